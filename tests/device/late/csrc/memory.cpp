#include "memory.hpp"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace late {

namespace {

constexpr size_t SPACE = size_t{64} << 30;  // addresses
constexpr size_t CAPACITY = size_t{16} << 30;
constexpr size_t GRANULE = 512;

uintptr_t guarded = 0;
int fault_output = STDERR_FILENO;
struct sigaction before;
const struct sigaction standard = [] {
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  return action;
}();

// Says what happened, then lets the handler from before us (Python's faulthandler, say) show where.
void on_fault(int signal, siginfo_t* info, void* context) {
  static volatile sig_atomic_t entered = 0;
  if (entered != 0) {  // by that handler, or by the instruction again
    sigaction(SIGSEGV, &standard, nullptr);
    return;
  }
  entered = 1;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (address >= guarded && address < guarded + SPACE) {
    char text[160] = "\nhost code touched memory of the device late, at address 0x";
    size_t length = strlen(text);
    for (int shift = 44; shift >= 0; shift -= 4) text[length++] = "0123456789abcdef"[(address >> shift) & 15];
    const char* rest = "; only work on its streams may: copy it to the host first\n";
    memcpy(text + length, rest, strlen(rest));
    [[maybe_unused]] const auto written = write(fault_output, text, length + strlen(rest));
  }
  if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr)
    before.sa_sigaction(signal, info, context);
  else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
    before.sa_handler(signal);
}  // returns to the instruction that faulted, which faults again

void install() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  struct sigaction now = {};
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_sigaction != on_fault) sigaction(SIGSEGV, &action, &before);
}

void* mapped(int file, int protection) {
  void* address = mmap(nullptr, SPACE, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  TORCH_CHECK(address != MAP_FAILED, "mapping the memory of device late: ", strerror(errno));
  madvise(address, SPACE, MADV_DONTFORK);
  madvise(address, SPACE, MADV_DONTDUMP);
  return address;
}

}  // namespace

Memory::Memory(Streams& streams) : streams_(streams), capacity_(CAPACITY) {
  file_ = memfd_create("late", MFD_CLOEXEC);
  TORCH_CHECK(file_ >= 0 && ftruncate(file_, SPACE) == 0, "making the memory of device late: ", strerror(errno));
  base_ = reinterpret_cast<uintptr_t>(mapped(file_, PROT_NONE));
  alias_base_ = reinterpret_cast<uintptr_t>(mapped(file_, PROT_READ | PROT_WRITE));
  top_ = base_;
  guarded = base_;
  install();
}

bool Memory::contains(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return at >= base_ && at < base_ + SPACE;
}

void* Memory::alias(const void* address) const {
  if (address == nullptr) return nullptr;
  TORCH_CHECK(contains(address), "no address of device late");
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) - base_ + alias_base_);
}

void Memory::poison(uintptr_t begin, size_t bytes, size_t stream, const char* name) {
  void* at = alias(reinterpret_cast<void*>(begin));
  streams_.issue(stream, {name, [at, bytes] { memset(at, POISON, bytes); }, {{begin, begin + bytes, true}}, bytes, true});
}

uintptr_t Memory::take(size_t bytes, size_t stream) {
  Free& mine = free_[stream];
  auto best = mine.end();  // the smallest that suffices, of equals the one freed last
  for (auto block = mine.begin(); block != mine.end(); ++block) {
    const auto [size, when] = block->second;
    if (size < bytes) continue;
    if (best == mine.end() || size < best->second.first || (size == best->second.first && when > best->second.second)) best = block;
  }
  if (best != mine.end()) {
    const auto [begin, found] = *best;
    mine.erase(best);
    if (found.first > bytes) mine[begin + bytes] = {found.first - bytes, found.second};
    return begin;
  }
  if (static_cast<size_t>(account_.reserved) + bytes > capacity_) return 0;
  uintptr_t begin = 0;
  for (auto block = unused_.begin(); block != unused_.end(); ++block) {
    if (block->second.first < bytes) continue;
    const auto [at, found] = *block;
    unused_.erase(block);
    if (found.first > bytes) unused_[at + bytes] = {found.first - bytes, 0};
    begin = at;
    break;
  }
  if (begin == 0) {
    if (top_ + bytes > base_ + SPACE) return 0;
    begin = top_;
    top_ += bytes;
  }
  account_.reserved += static_cast<int64_t>(bytes);
  account_.peak_reserved = std::max(account_.peak_reserved, account_.reserved);
  poison(begin, bytes, stream, "new memory");
  return begin;
}

void* Memory::allocate(size_t bytes, size_t stream) {
  if (bytes == 0) return nullptr;
  const size_t whole = (bytes + GRANULE - 1) / GRANULE * GRANULE;
  std::unique_lock lock(mutex_);
  uintptr_t begin = take(whole, stream);
  if (begin == 0) {  // as PyTorch's allocators: wait, give all that is free back, try again
    ++account_.retries;
    lock.unlock();
    empty_cache();
    lock.lock();
    begin = take(whole, stream);
  }
  if (begin == 0) {
    ++account_.out_of_memory;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "late out of memory. Tried to allocate ", bytes, " bytes; of ", capacity_, " bytes ",
                     account_.allocated, " are allocated.");
  }
  blocks_[begin] = {whole, bytes, stream, {}};
  account_.requested += static_cast<int64_t>(bytes);
  account_.allocated += static_cast<int64_t>(whole);
  account_.peak_requested = std::max(account_.peak_requested, account_.requested);
  account_.peak_allocated = std::max(account_.peak_allocated, account_.allocated);
  account_.peak_blocks = std::max(account_.peak_blocks, ++account_.blocks);
  ++account_.allocations;
  lock.unlock();
  if (const Watcher told = watcher_) told(begin, static_cast<int64_t>(whole));
  return reinterpret_cast<void*>(begin);
}

void Memory::give(Free& free, uintptr_t begin, size_t bytes) {
  auto after = free.lower_bound(begin);
  if (after != free.end() && after->first == begin + bytes) {
    bytes += after->second.first;
    after = free.erase(after);
  }
  if (after != free.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second.first == begin) {
      begin = before->first;
      bytes += before->second.first;
    }
  }
  free[begin] = {bytes, ++now_};
}

void Memory::free(void* address) {
  std::unique_lock lock(mutex_);
  const auto found = blocks_.find(reinterpret_cast<uintptr_t>(address));
  if (found == blocks_.end()) return;
  const uintptr_t begin = found->first;
  const Block block = found->second;
  blocks_.erase(found);
  account_.requested -= static_cast<int64_t>(block.requested);
  account_.allocated -= static_cast<int64_t>(block.bytes);
  --account_.blocks;
  ++account_.frees;
  for (const size_t other : block.used_by) streams_.wait(block.stream, streams_.record(other));
  poison(begin, block.bytes, block.stream, "freeing memory");
  give(free_[block.stream], begin, block.bytes);
  lock.unlock();
  if (const Watcher told = watcher_) told(begin, -static_cast<int64_t>(block.bytes));
}

void Memory::used_by(void* address, size_t stream) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(reinterpret_cast<uintptr_t>(address));
  if (found != blocks_.end() && found->second.stream != stream) found->second.used_by.push_back(stream);
}

void Memory::empty_cache() {
  streams_.host_wait_all("");
  const std::lock_guard lock(mutex_);
  for (auto& [stream, free] : free_) {
    for (const auto& [begin, found] : free) {
      const size_t bytes = found.first;
      account_.reserved -= static_cast<int64_t>(bytes);
      streams_.forget(begin, begin + bytes);
      const auto offset = static_cast<off_t>(begin - base_);
      fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, static_cast<off_t>(bytes));
      give(unused_, begin, bytes);
    }
  }
  free_.clear();
}

Account Memory::account() {
  const std::lock_guard lock(mutex_);
  return account_;
}

void Memory::reset_peak() {
  const std::lock_guard lock(mutex_);
  account_.peak_requested = account_.requested;
  account_.peak_allocated = account_.allocated;
  account_.peak_reserved = account_.reserved;
  account_.peak_blocks = account_.blocks;
}

void Memory::reset_accumulated() {
  const std::lock_guard lock(mutex_);
  account_.allocations = account_.frees = account_.retries = account_.out_of_memory = 0;
}

void Memory::set_fault_output(int file) {
  fault_output = file;
  install();  // again, before handlers that came since: those see the address no more
}

void Memory::set_capacity(size_t bytes) {
  const std::lock_guard lock(mutex_);
  capacity_ = bytes;
}

}  // namespace late
