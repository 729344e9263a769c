// Host memory that copies may read and write in their stream's order: what PyTorch's pinned allocator hands out, and ranges that were
// registered. Memory of the allocator is poisoned when the last tensor and the last pending copy let it go. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace late {

class Pinned {
 public:
  void* allocate(size_t bytes);
  void free(void* address);
  bool enroll(uintptr_t begin, size_t bytes);  // false where it overlaps what is pinned already
  bool withdraw(uintptr_t begin);
  bool contains(const void* address) const;
  size_t bytes() const;  // of the allocator and registered
  void set_limit(size_t bytes);

 private:
  struct Range {
    size_t bytes;
    bool registered;
  };
  mutable std::mutex mutex_;
  std::map<uintptr_t, Range> ranges_;  // by first byte
  size_t bytes_ = 0;
  size_t limit_ = SIZE_MAX;
};

}  // namespace late
