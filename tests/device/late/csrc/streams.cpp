#include <Python.h>

#include "streams.hpp"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <cmath>

#include "settings.hpp"

namespace late {

namespace {

thread_local bool on_stream = false;

// Lets Python run while this thread waits: work on a stream may be a call of Python.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void Recording::finish() {
  at = seconds();
  done = true;
  done.notify_all();
}

struct Streams::Queue {
  size_t index = 0;
  uint64_t issued = 0;  // works; under Streams::mutex_
  double time = 0;      // of the model, when all that was issued has ended; under Streams::mutex_
  std::mutex mutex;     // of what is below
  std::condition_variable changed;
  std::deque<std::function<void(Queue&)>> jobs;
  std::deque<Logged> log;
  bool busy = false;
  bool ends = false;
  std::thread thread;
};

bool Streams::on_stream_thread() { return on_stream; }

Streams::Queue& Streams::at(size_t stream) {
  if (queues_.size() <= stream) queues_.resize(stream + 1);
  if (!queues_[stream]) {
    queues_[stream] = std::make_shared<Queue>();
    queues_[stream]->index = stream;
    queues_[stream]->thread = std::thread([this, queue = queues_[stream].get()] { run(*queue); });
  }
  return *queues_[stream];
}

size_t Streams::create() {
  const std::lock_guard lock(mutex_);
  const size_t made = created_++;
  return made < MOST ? made : 1 + made % (MOST - 1);
}

size_t Streams::count() {
  const std::lock_guard lock(mutex_);
  return queues_.size();
}

void Streams::run(Queue& queue) {
  on_stream = true;
  thread_settings();
  std::unique_lock lock(queue.mutex);
  while (true) {
    queue.changed.wait(lock, [&] { return queue.ends || !queue.jobs.empty(); });
    if (queue.jobs.empty()) return;
    auto job = std::move(queue.jobs.front());
    queue.jobs.pop_front();
    queue.busy = true;
    lock.unlock();
    wait_until_wanted();
    job(queue);
    job = nullptr;
    lock.lock();
    queue.busy = false;
  }
}

void Streams::push(Queue& queue, std::function<void(Queue&)> job) {
  {
    const std::lock_guard lock(queue.mutex);
    queue.jobs.push_back(std::move(job));
  }
  queue.changed.notify_one();
}

void Streams::wait_until_wanted() {
  std::unique_lock lock(gate_);
  wanted_.wait(lock, [&] { return !lazy_ || asked_ || waiting_ > 0; });
}

void Streams::want(int change) {
  {
    const std::lock_guard lock(gate_);
    waiting_ += change;
    asked_ |= change == 0;
  }
  wanted_.notify_all();
}

void Streams::set_lazy(bool on) {
  {
    const std::lock_guard lock(gate_);
    lazy_ = on;
    asked_ = false;
  }
  wanted_.notify_all();
}

bool Streams::host_knows_writes(uintptr_t begin, uintptr_t end) {
  const std::lock_guard lock(mutex_);
  return order_.host_knows_writes(begin, end);
}

void Streams::host_access(const std::string& name, const std::vector<Access>& accesses) {
  if (!detects_) return;
  const std::lock_guard lock(mutex_);
  order_.host_access(name, accesses, [&](const std::string& text) { counters_.defect("unordered accesses", text); });
}

double Streams::delay(size_t stream, uint64_t number) {
  if (delays_.longest <= 0) return 0;
  const uint64_t bits = mixed(delays_.seed ^ mixed(stream * 0x10001 ^ mixed(number)));
  const double chance = static_cast<double>(bits >> 40) / static_cast<double>(1 << 24);
  if (chance >= delays_.chance) return 0;
  const double share = static_cast<double>(bits & 0xffffff) / static_cast<double>(1 << 24);
  return delays_.exponential ? std::min(delays_.longest, -std::log1p(-share) * delays_.longest / 4) : share * delays_.longest;
}

void Streams::issue(size_t stream, Work work) {
  if (stopped_) return;
  const Settings settings = Settings::here();
  {
    const std::lock_guard lock(gate_);
    asked_ = false;
  }
  const std::lock_guard lock(mutex_);
  Queue& queue = at(stream);
  order_.issue(stream);
  if (detects_ && !work.accesses.empty()) {
    order_.access(stream, work.name, work.accesses, [&](const std::string& text) { counters_.defect("unordered accesses", text); });
  }
  const double late_by = work.prompt ? 0 : delay(stream, queue.issued++);
  const double begins = std::max(queue.time, host_time());
  queue.time = begins + duration(work);
  const bool modelled = models_;
  const double due[] = {begins - epoch_, queue.time - epoch_};
  work.accesses.clear();
  push(queue, [this, settings, late_by, modelled, from = due[0], to = due[1], work = std::move(work)](Queue& on) {
    if (late_by > 0) std::this_thread::sleep_for(std::chrono::duration<double>(late_by));
    const double start = seconds();
    try {
      settings.apply();
      work.run();
    } catch (const c10::Error& error) {
      fail(on.index, work.name, error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(on.index, work.name, error.what());
    }
    if (work.prompt) return;
    const std::lock_guard logging(on.mutex);
    on.log.push_back({work.name, modelled ? from : start, modelled ? to : seconds(), work.bytes, late_by});
    if (on.log.size() > 200'000) on.log.pop_front();
  });
}

std::shared_ptr<Recording> Streams::record(size_t stream) {
  auto recording = std::make_shared<Recording>();
  recording->stream = stream;
  const std::lock_guard lock(mutex_);
  recording->clock = order_.clock(stream);
  recording->due = std::max(at(stream).time, host_time());
  if (stopped_) {
    recording->finish();
  } else {
    push(at(stream), [recording](Queue&) { recording->finish(); });
  }
  return recording;
}

void Streams::wait(size_t stream, const std::shared_ptr<Recording>& recording) {
  const std::lock_guard lock(mutex_);
  order_.stream_waited(stream, recording->clock);
  at(stream).time = std::max(at(stream).time, recording->due);
  if (!stopped_) push(at(stream), [recording](Queue&) { recording->done.wait(false); });
}

bool Streams::query(const std::shared_ptr<Recording>& recording) {
  counters_.add("queries");
  if (const auto there = modelled(recording->due)) {
    if (!*there) return false;
    await(*recording);
  }
  if (!recording->done) {
    want(0);
    return false;
  }
  finished_waiting(*recording);
  return true;
}

bool Streams::idle(size_t stream) {
  counters_.add("queries");
  if (const auto there = modelled(record(stream)->due)) {
    if (!*there) return false;
    await(*record(stream));
  }
  const std::lock_guard lock(mutex_);
  Queue& queue = at(stream);
  {
    const std::lock_guard looking(queue.mutex);
    if (queue.busy || !queue.jobs.empty()) {
      want(0);
      return false;
    }
  }
  order_.host_waited(order_.clock(stream));
  return true;
}

void Streams::finished_waiting(const Recording& recording) {
  const std::lock_guard lock(mutex_);
  order_.host_waited(recording.clock);
  host_time() = std::max(host_time(), recording.due);
}

void Streams::await(const Recording& recording) {
  const WithoutGil without;
  want(1);
  recording.done.wait(false);
  want(-1);
}

std::optional<bool> Streams::modelled(double due) {
  const std::lock_guard lock(mutex_);
  if (!models_) return std::nullopt;
  return due <= host_time();
}

double& Streams::host_time() {
  double& time = host_times_[std::this_thread::get_id()];
  time = std::max(time, epoch_);
  return time;
}

double Streams::duration(const Work& work) const {
  if (!models_ || work.prompt) return 0;
  const auto found = durations_.find(work.name);
  return found == durations_.end() ? otherwise_ : found->second;
}

void Streams::set_durations(std::map<std::string, double> durations, double otherwise) {
  const std::lock_guard lock(mutex_);
  durations_ = std::move(durations);
  otherwise_ = otherwise;
  models_ = otherwise > 0 || !durations_.empty();
  for (auto& queue : queues_)
    if (queue) epoch_ = std::max(epoch_, queue->time);
  for (const auto& [thread, time] : host_times_) epoch_ = std::max(epoch_, time);
  for (auto& queue : queues_)
    if (queue) queue->time = epoch_;
}

void Streams::fail(size_t stream, const std::string& name, const char* why) {
  counters_.add("failures on streams", name);
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = name + " failed on stream " + std::to_string(stream) + " of device late: " + why;
}

void Streams::raise_failure() {
  std::string failure;
  {
    const std::lock_guard lock(mutex_);
    failure.swap(failure_);
  }
  TORCH_CHECK(failure.empty(), failure);
}

void Streams::host_wait(const std::shared_ptr<Recording>& recording, const char* why, const std::string& detail) {
  if (*why != 0) {
    counters_.add("host waits", "thread " + std::to_string(gettid()));
    counters_.add(why, detail);
    TORCH_CHECK(!waits_forbidden_, "the host waits for device late (", why, detail.empty() ? "" : ": ", detail,
                "), which late.waits_forbidden() forbids here");
  }
  TORCH_CHECK(!on_stream, "work on a stream of device late waits for the device: nothing would ever end");
  await(*recording);
  finished_waiting(*recording);
  raise_failure();
}

void Streams::host_wait_all(const char* why) {
  std::vector<std::shared_ptr<Recording>> all;
  for (size_t stream = 0; stream < count(); ++stream) all.push_back(record(stream));
  if (all.empty()) all.push_back(record(0));
  for (size_t i = 0; i < all.size(); ++i) host_wait(all[i], i == 0 ? why : "");
}

void Streams::set_delays(const Delays& delays) {
  const std::lock_guard lock(mutex_);
  delays_ = delays;
  for (auto& queue : queues_)
    if (queue) queue->issued = 0;
}

Drive Streams::drive_begins(const std::string& name, const Access& access) {
  const std::lock_guard lock(mutex_);
  const size_t stream = MOST + drives_++ % 64;
  order_.issue(stream);
  if (detects_)
    order_.access(stream, name, {access}, [&](const std::string& text) { counters_.defect("unordered accesses", text); });
  return {stream, order_.clock(stream)[stream]};
}

void Streams::drive_ended(const Drive& drive) {
  const std::lock_guard lock(mutex_);
  Clock clock(drive.stream + 1, 0);
  clock[drive.stream] = drive.number;
  order_.host_waited(clock);
}

void Streams::forget(uintptr_t begin, uintptr_t end) {
  const std::lock_guard lock(mutex_);
  order_.forget(begin, end);
}

std::vector<Logged> Streams::log(size_t stream) {
  const std::lock_guard lock(mutex_);
  if (stream >= queues_.size() || !queues_[stream]) return {};
  const std::lock_guard reading(queues_[stream]->mutex);
  return {queues_[stream]->log.begin(), queues_[stream]->log.end()};
}

void Streams::clear_logs() {
  const std::lock_guard lock(mutex_);
  for (auto& queue : queues_) {
    if (!queue) continue;
    const std::lock_guard clearing(queue->mutex);
    queue->log.clear();
  }
}

void Streams::stop() {
  if (stopped_.exchange(true)) return;
  set_lazy(false);
  const WithoutGil without;
  std::vector<Queue*> queues;
  {
    const std::lock_guard lock(mutex_);
    for (auto& queue : queues_)
      if (queue) queues.push_back(queue.get());
  }
  for (Queue* queue : queues) {
    {
      const std::lock_guard lock(queue->mutex);
      queue->ends = true;
    }
    queue->changed.notify_all();
  }
  for (Queue* queue : queues) queue->thread.join();
}

}  // namespace late
