// The device: one per process, made at first use and never destroyed, as PyTorch's own are.
#pragma once

#include <atomic>

#include "counters.hpp"
#include "memory.hpp"
#include "pinned.hpp"
#include "streams.hpp"

namespace late {

struct Device {
  Counters counters;
  Streams streams{counters};
  Memory memory{streams};
  Pinned pinned;
  std::atomic<int64_t> events = 0;  // that exist
};

Device& device();           // raises in a forked child
Device* device_or_null();   // null there

size_t current_stream();  // of this thread
size_t exchange_stream(size_t stream);

}  // namespace late
