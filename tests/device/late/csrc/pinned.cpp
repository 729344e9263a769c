#include "pinned.hpp"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstring>

#include "device.hpp"

namespace late {

void* Pinned::allocate(size_t bytes) {
  if (bytes == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(bytes_ + bytes <= limit_, "pinning ", bytes, " bytes for device late: more than the limit of ", limit_, " bytes");
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "allocating ", bytes, " bytes of pinned memory: ", strerror(errno));
  memset(address, POISON, bytes);
  ranges_[reinterpret_cast<uintptr_t>(address)] = {bytes, false};
  bytes_ += bytes;
  return address;
}

// Unmapped, so that a later touch is a fault.
void Pinned::free(void* address) {
  if (address == nullptr) return;
  const auto begin = reinterpret_cast<uintptr_t>(address);
  size_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(begin);
    if (found == ranges_.end()) return;
    bytes = found->second.bytes;
    ranges_.erase(found);
    bytes_ -= bytes;
  }
  device().streams.forget(begin, begin + bytes);
  munmap(address, bytes);
}

bool Pinned::enroll(uintptr_t begin, size_t bytes) {
  const std::lock_guard lock(mutex_);
  auto after = ranges_.lower_bound(begin);
  if (after != ranges_.end() && after->first < begin + bytes) return false;
  if (after != ranges_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > begin) return false;
  if (bytes_ + bytes > limit_) return false;
  ranges_[begin] = {bytes, true};
  bytes_ += bytes;
  return true;
}

bool Pinned::withdraw(uintptr_t begin) {
  size_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(begin);
    if (found == ranges_.end() || !found->second.registered) return false;
    bytes = found->second.bytes;
    bytes_ -= bytes;
    ranges_.erase(found);
  }
  device().streams.forget(begin, begin + bytes);
  return true;
}

bool Pinned::contains(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  auto after = ranges_.upper_bound(at);
  return after != ranges_.begin() && at < std::prev(after)->first + std::prev(after)->second.bytes;
}

size_t Pinned::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

void Pinned::set_limit(size_t bytes) {
  const std::lock_guard lock(mutex_);
  limit_ = bytes;
}

}  // namespace late
