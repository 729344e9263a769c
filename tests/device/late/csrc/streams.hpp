// Streams as threads that run what they are given, late on purpose, and the events that order them.
//
// Any thread may issue work, record, wait and query; work itself runs on its stream's thread, in the order it was issued there. Nothing
// but events and host waits orders two streams. Owned by Device, which is never destroyed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "counters.hpp"
#include "order.hpp"

namespace late {

double seconds();  // of the monotonic clock, as in Python's time.monotonic()

// One recording of an event: where in its stream, and when the stream got there.
struct Recording {
  std::atomic<bool> done = false;
  double at = 0;  // seconds; valid once done
  double due = 0;  // seconds of the model of time, see Streams::set_durations
  size_t stream = 0;
  Clock clock;  // of the stream, when the event was recorded
  void finish();
};

struct Work {
  std::string name;
  std::function<void()> run;
  std::vector<Access> accesses;
  size_t bytes = 0;
  bool prompt = false;  // runs without delay, and isn't logged: what the device does for itself
};

struct Logged {
  std::string name;
  double start;  // seconds, after the delay; of the model of time where there is one
  double end;
  size_t bytes;
  double late_by;  // the delay before it; seconds
};

struct Drive {
  size_t stream;
  uint64_t number;
};

struct Delays {
  uint64_t seed = 0;
  double longest = 0;  // seconds
  double chance = 1;   // of a work to be late at all
  bool exponential = false;
};

class Streams {
 public:
  explicit Streams(Counters& counters) : counters_(counters) {}

  static constexpr size_t MOST = 256;
  size_t create();  // round robin after MOST
  size_t count();

  void issue(size_t stream, Work work);
  std::shared_ptr<Recording> record(size_t stream);
  void wait(size_t stream, const std::shared_ptr<Recording>& recording);
  bool query(const std::shared_ptr<Recording>& recording);
  bool idle(size_t stream);

  // The host waits. Releases the GIL where the caller holds it, and raises what failed on a stream meanwhile. `why` names the counter,
  // or is empty for what the device does for itself; `detail` says who.
  void host_wait(const std::shared_ptr<Recording>& recording, const char* why, const std::string& detail = {});
  void host_wait_all(const char* why);

  void set_delays(const Delays& delays);
  // Keeps a model of time beside the real one: each work takes what is set for its name, else `otherwise`, and begins once its stream,
  // what that waits for and the host thread that issues it have come there; a host thread takes no time but where it waits. It depends
  // on the order of calls alone. Events are queried by it. Where nothing takes any time there is no such model.
  void set_durations(std::map<std::string, double> durations, double otherwise);
  void set_lazy(bool on);  // streams run only while the host waits, or asks and finds that something isn't done
  bool host_knows_writes(uintptr_t begin, uintptr_t end);  // see Order
  // What the host does to pinned memory, for the detector: unordered with what it hasn't waited for. See Order.
  void host_access(const std::string& name, const std::vector<Access>& accesses);
  void set_detection(bool on) { detects_ = on; }
  void forbid_waits(bool on) { waits_forbidden_ = on; }  // the next host wait that counts raises
  void forget(uintptr_t begin, uintptr_t end);           // see Order

  // A transfer between a drive and host memory, for the detector: ordered after all that the host has waited for, and known to it once
  // it has waited. Each is like a work on one of a few further streams. Returns what to name it by.
  Drive drive_begins(const std::string& name, const Access& access);
  void drive_ended(const Drive& drive);
  std::vector<Logged> log(size_t stream);
  void clear_logs();

  // Ends the threads when all work is done; later work is dropped. Called once, at the end of the process.
  void stop();
  bool stopped() const { return stopped_; }
  static bool on_stream_thread();

 private:
  struct Queue;
  void run(Queue& queue);
  double delay(size_t stream, uint64_t number);
  void await(const Recording& recording);
  std::optional<bool> modelled(double due);  // whether the host thread has come there, in the model of time; none without one
  double& host_time();
  double duration(const Work& work) const;
  Queue& at(size_t stream);
  void push(Queue& queue, std::function<void(Queue&)> job);
  void finished_waiting(const Recording& recording);
  void fail(size_t stream, const std::string& name, const char* why);
  void raise_failure();
  void wait_until_wanted();
  void want(int change);

  Counters& counters_;
  std::mutex mutex_;  // of all below, and of issuing: the order of issue is the same for all streams
  std::vector<std::shared_ptr<Queue>> queues_;
  size_t created_ = 1;  // the default stream is there
  size_t drives_ = 0;   // transfers of drives so far
  Order order_;
  Delays delays_;
  std::string failure_;
  std::map<std::string, double> durations_;
  double otherwise_ = 0;
  bool models_ = false;
  double epoch_ = 0;  // when the model began
  std::map<std::thread::id, double> host_times_;
  std::mutex gate_;  // of the next four
  std::condition_variable wanted_;
  bool lazy_ = false;
  bool asked_ = false;  // since work was issued last
  int waiting_ = 0;     // hosts
  std::atomic<bool> detects_ = true;
  std::atomic<bool> waits_forbidden_ = false;
  std::atomic<bool> stopped_ = false;
};

}  // namespace late
