#include "device.hpp"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <utility>

namespace late {

namespace {

std::atomic<bool> forked = false;
thread_local size_t stream_here = 0;

}  // namespace

Device* device_or_null() {
  static Device* made = [] {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return new Device;
  }();
  return forked ? nullptr : made;
}

Device& device() {
  Device* made = device_or_null();
  TORCH_CHECK(made != nullptr, "device late cannot be used in a forked process; start it by spawn");
  return *made;
}

size_t current_stream() { return stream_here; }

size_t exchange_stream(size_t stream) { return std::exchange(stream_here, stream); }

}  // namespace late
