// Device memory: one file without a name, mapped twice. At a tensor's address nothing may be touched; the second mapping, `alias`, is for
// the threads of streams. Blocks belong to the stream they were allocated on, as in PyTorch's caching allocators: freed memory is poisoned
// in that stream's order, and handed out again to that stream at once.
//
// Any thread may allocate and free. Owned by Device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "streams.hpp"

namespace late {

constexpr unsigned char POISON = 0xff;  // NaN in each floating type, -1 in each integer

struct Account {  // bytes; "requested" as asked for, the others in whole granules of 512
  int64_t requested = 0, peak_requested = 0;
  int64_t allocated = 0, peak_allocated = 0;
  int64_t reserved = 0, peak_reserved = 0;
  int64_t allocations = 0, frees = 0, blocks = 0, peak_blocks = 0;
  int64_t retries = 0, out_of_memory = 0;
};

class Memory {
 public:
  explicit Memory(Streams& streams);

  void* allocate(size_t bytes, size_t stream);  // raises c10::OutOfMemoryError
  void free(void* address);
  void used_by(void* address, size_t stream);  // record_stream
  void empty_cache();

  bool contains(const void* address) const;
  void* alias(const void* address) const;  // of memory on the device; for threads of streams
  uintptr_t base() const { return base_; }

  Account account();
  void reset_peak();
  void reset_accumulated();
  size_t capacity() const { return capacity_; }
  void set_capacity(size_t bytes);
  using Watcher = void (*)(uint64_t address, int64_t bytes);
  void watch(Watcher watcher) { watcher_ = watcher; }  // told of each block, in whole granules; negative when it is freed; or null
  static void set_fault_output(int file);  // where a fault's message goes; standard error before

 private:
  struct Block {
    size_t bytes;      // whole granules
    size_t requested;
    size_t stream;
    std::vector<size_t> used_by;  // further streams
  };
  using Free = std::map<uintptr_t, std::pair<size_t, uint64_t>>;  // address: bytes, when it was freed
  uintptr_t take(size_t bytes, size_t stream);                    // 0 if there is none
  void give(Free& free, uintptr_t begin, size_t bytes);
  void poison(uintptr_t begin, size_t bytes, size_t stream, const char* name);

  Streams& streams_;
  uintptr_t base_ = 0;
  uintptr_t alias_base_ = 0;
  int file_ = -1;
  std::atomic<Watcher> watcher_ = nullptr;
  std::mutex mutex_;  // of all below
  size_t capacity_;
  uintptr_t top_;     // never used beyond
  uint64_t now_ = 0;  // counts frees
  std::unordered_map<uintptr_t, Block> blocks_;
  std::unordered_map<size_t, Free> free_;  // by stream
  Free unused_;                            // of no stream, below top_
  Account account_;
};

}  // namespace late
