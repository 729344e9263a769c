// What PyTorch asks of a device: devices, streams and events (the guard), allocators, and the hooks of a PrivateUse1 backend.

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.hpp"
#include "generator.hpp"
#include "tensors.hpp"

namespace late {

namespace {

const c10::Device HERE(c10::DeviceType::PrivateUse1, 0);

struct Event {
  Event() { ++device().events; }
  ~Event() {
    if (Device* made = device_or_null()) --made->events;
  }
  std::mutex mutex;
  std::shared_ptr<Recording> latest;
  std::shared_ptr<Recording> recording() {
    const std::lock_guard lock(mutex);
    return latest;
  }
};

size_t index(const c10::Stream& stream) { return static_cast<size_t>(stream.id()); }

c10::Stream stream(size_t index) { return c10::Stream(c10::Stream::UNSAFE, HERE, static_cast<c10::StreamId>(index)); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return HERE;
  }
  c10::Device getDevice() const override { return HERE; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one device late, late:0; found ", device.str());
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(device().streams.create()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(device().streams.create()); }
  c10::Stream exchangeStream(c10::Stream to) const override { return stream(exchange_stream(index(to))); }
  bool queryStream(const c10::Stream& stream) const override { return device().streams.idle(index(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    device().streams.host_wait(device().streams.record(index(stream)), "synchronized streams");
  }
  void synchronizeDevice(c10::DeviceIndex) const override { device().streams.host_wait_all("synchronized device"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device().counters.add("memory kept by autograd");
    device().memory.used_by(data.get(), index(stream));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    auto* made = static_cast<Event*>(*event);
    auto recording = device().streams.record(index(stream));
    const std::lock_guard lock(made->mutex);
    made->latest = std::move(recording);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) device().streams.wait(index(stream), static_cast<Event*>(event)->recording());
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || device().streams.query(static_cast<Event*>(event)->recording());
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) device().streams.host_wait(static_cast<Event*>(event)->recording(), "synchronized events");
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "both events must be recorded before their times are asked for");
    const auto first = static_cast<Event*>(from)->recording();
    const auto last = static_cast<Event*>(to)->recording();
    TORCH_CHECK(first->done && last->done, "device late has not come to both events yet: synchronize first");
    return (last->at - first->at) * 1000;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

void free_device(void* address) {
  if (Device* made = device_or_null()) made->memory.free(address);
}

c10::CachingAllocator::Stat stat(int64_t current, int64_t peak, int64_t allocated = 0, int64_t freed = 0) {
  c10::CachingAllocator::Stat made;
  made.current = current;
  made.peak = peak;
  made.allocated = allocated;
  made.freed = freed;
  return made;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = device().memory.allocate(bytes, current_stream());
    return {address, address, &free_device, HERE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* into, const void* from, size_t bytes) const override {
    Memory& memory = device().memory;
    void* target = memory.alias(into);
    const void* source = memory.alias(from);
    const auto to = reinterpret_cast<uintptr_t>(into);
    const auto at = reinterpret_cast<uintptr_t>(from);
    device().streams.issue(current_stream(), {"clone of memory", [=] { memcpy(target, source, bytes); },
                                              {{at, at + bytes, false}, {to, to + bytes, true}}, bytes});
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { device().memory.empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { device().memory.used_by(data.get(), index(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const Account account = device().memory.account();
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocation[0] = stat(account.blocks, account.peak_blocks, account.allocations, account.frees);
    stats.allocated_bytes[0] = stats.active_bytes[0] = stat(account.allocated, account.peak_allocated);
    stats.requested_bytes[0] = stat(account.requested, account.peak_requested);
    stats.reserved_bytes[0] = stat(account.reserved, account.peak_reserved);
    stats.num_alloc_retries = account.retries;
    stats.num_ooms = account.out_of_memory;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override { device().memory.reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex) override { device().memory.reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const size_t all = device().memory.capacity();
    return {all - std::min(all, static_cast<size_t>(device().memory.account().reserved)), all};
  }
};

void free_pinned(void* address) {
  if (Device* made = device_or_null()) made->pinned.free(address);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = device().pinned.allocate(bytes);
    return {address, address, &free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* into, const void* from, size_t bytes) const override { memcpy(into, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // a pending copy holds its tensor
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return device().pinned.contains(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(device().memory.contains(data), "no address of device late");
    return HERE;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

Hooks hooks;

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_memory);
  at::setHostAllocator(c10::DeviceType::PrivateUse1, &pinned_memory);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

}  // namespace late
