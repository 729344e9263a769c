// What the Python side calls, by ctypes: without the GIL, on plain C types, without exceptions.

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "device.hpp"
#include "fallback.hpp"
#include "host.hpp"

namespace {

using late::device;

thread_local std::string failure;  // of a call of Python on this thread

struct Hold {
  std::atomic<bool> released = false;
};
std::mutex holding;
std::map<int64_t, std::shared_ptr<Hold>> holds;

std::string quoted(const std::string& text) {
  std::string made = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') made += '\\';
    made += c == '\n' ? ' ' : c;
  }
  return made + "\"";
}

char* given(const std::string& text) {
  char* made = static_cast<char*>(malloc(text.size() + 1));
  memcpy(made, text.c_str(), text.size() + 1);
  return made;
}

}  // namespace

extern "C" {

void late_start() {
  device();
  late::prefer_cpu_kernels();
  late::watch_host();
}

void late_stop() {
  if (late::Device* made = late::device_or_null()) made->streams.stop();
}

void late_set_delays(uint64_t seed, double longest, double chance, bool exponential) {
  device().streams.set_delays({seed, longest, chance, exponential});
}

// `names` and `seconds` by number.
void late_set_durations(size_t count, const char* const* names, const double* seconds, double otherwise) {
  std::map<std::string, double> durations;
  for (size_t i = 0; i < count; ++i) durations[names[i]] = seconds[i];
  device().streams.set_durations(std::move(durations), otherwise);
}

void late_set_lazy(bool on) { device().streams.set_lazy(on); }
void late_set_detection(bool on) { device().streams.set_detection(on); }
void late_forbid_waits(bool on) { device().streams.forbid_waits(on); }
void late_set_capacity(size_t bytes) { device().memory.set_capacity(bytes); }
void late_set_pinned_limit(size_t bytes) { device().pinned.set_limit(bytes); }
size_t late_pinned_bytes() { return device().pinned.bytes(); }
int64_t late_events() { return device().events; }
bool late_register_host(uintptr_t address, size_t bytes) { return device().pinned.enroll(address, bytes); }
bool late_unregister_host(uintptr_t address) { return device().pinned.withdraw(address); }
void late_set_fault_output(int file) { device().memory.set_fault_output(file); }
void late_watch_memory(late::Memory::Watcher watcher) { device().memory.watch(watcher); }
void late_reset_peak() { device().memory.reset_peak(); }
void late_count(const char* name) { device().counters.add(name); }
void late_defect(const char* kind, const char* detail) { device().counters.defect(kind, detail); }
void late_free_text(char* text) { free(text); }

void late_clear() {
  device().counters.clear();
  device().streams.clear_logs();
}

// {"counters": {name: count}, "defects": [[kind, detail]], "account": {name: bytes or count}}
char* late_report() {
  std::ostringstream text;
  text << "{\"counters\": {";
  const char* between = "";
  for (const auto& [name, count] : device().counters.all()) {
    text << between << quoted(name) << ": " << count;
    between = ", ";
  }
  text << "}, \"defects\": [";
  between = "";
  for (const auto& [kind, detail] : device().counters.defects()) {
    text << between << "[" << quoted(kind) << ", " << quoted(detail) << "]";
    between = ", ";
  }
  const late::Account account = device().memory.account();
  text << "], \"account\": {\"now\": " << account.requested << ", \"peak\": " << account.peak_requested
       << ", \"reserved\": " << account.reserved << ", \"allocations\": " << account.allocations << ", \"frees\": " << account.frees << "}}";
  return given(text.str());
}

// [[name, start, end, bytes, delay]] of one stream, in its order.
char* late_log(int64_t stream) {
  std::ostringstream text;
  text.precision(9);
  text << std::fixed << "[";
  const char* between = "";
  for (const late::Logged& work : device().streams.log(static_cast<size_t>(stream))) {
    text << between << "[" << quoted(work.name) << ", " << work.start << ", " << work.end << ", " << work.bytes << ", " << work.late_by << "]";
    between = ", ";
  }
  text << "]";
  return given(text.str());
}

int64_t late_streams() { return static_cast<int64_t>(device().streams.count()); }

// A drive's transfer of pinned memory, which it writes or reads; 0 for other memory. See Streams::drive_begins.
int64_t late_drive_begins(const char* name, uint64_t address, uint64_t bytes, bool write) {
  if (bytes == 0 || !device().pinned.contains(reinterpret_cast<void*>(address))) return 0;
  const late::Drive drive = device().streams.drive_begins(name, {address, address + bytes, write});
  return static_cast<int64_t>(drive.stream << 40 | drive.number);
}

void late_drive_ended(int64_t transfer) {
  if (transfer != 0) device().streams.drive_ended({static_cast<size_t>(transfer) >> 40, static_cast<uint64_t>(transfer) & ((1ull << 40) - 1)});
}

// The stream stands still from here on until it is released.
int64_t late_hold(int64_t stream) {
  static int64_t last = 0;
  auto hold = std::make_shared<Hold>();
  const std::lock_guard lock(holding);
  holds[++last] = hold;
  device().streams.issue(static_cast<size_t>(stream), {"hold", [hold] { hold->released.wait(false); }, {}, 0, true});
  return last;
}

void late_release(int64_t number) {
  const std::lock_guard lock(holding);
  const auto found = holds.find(number);
  if (found == holds.end()) return;
  found->second->released = true;
  found->second->released.notify_all();
  holds.erase(found);
}

void late_fail(const char* message) { failure = message; }

// Runs call(argument) on the stream; what it touches is given as `count` times first address, bytes, written.
void late_call(int64_t stream, const char* name, void (*call)(int64_t), int64_t argument, const uint64_t* touched, size_t count) {
  std::vector<late::Access> accesses;
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i, touched += 3) {
    accesses.push_back({touched[0], touched[0] + touched[1], touched[2] != 0});
    bytes += touched[1];
  }
  device().streams.issue(static_cast<size_t>(stream), {name,
                                                       [call, argument] {
                                                         call(argument);
                                                         std::string failed;
                                                         failed.swap(failure);
                                                         if (!failed.empty()) throw std::runtime_error(failed);
                                                       },
                                                       std::move(accesses), bytes});
}

}  // extern "C"
