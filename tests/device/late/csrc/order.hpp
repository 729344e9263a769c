// Which work is ordered after which, by vector clocks, and the accesses that nothing orders.
//
// Note: happens-before. Work number n of stream s is known to stream t if t's clock holds at least n for s. A stream's clock grows by its
// own work, by the clocks of events that it waits for, and by what the host had waited for when it issued the work. All of this is known
// when work is issued, so an unordered access is found in each run, whatever the delays were.
//
// The host has one clock: that one of its threads has waited is known to all of them. Owned by Streams, called under its lock.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace late {

using Clock = std::vector<uint64_t>;  // by stream: how much of its work has surely ended

void join(Clock& clock, const Clock& other);

struct Access {
  uintptr_t begin;  // bytes from begin to before end
  uintptr_t end;
  bool write;
};

class Order {
 public:
  // Counts one more work of `stream`, ordered after all that the host has waited for.
  void issue(size_t stream);
  const Clock& clock(size_t stream);
  void stream_waited(size_t stream, const Clock& clock);
  void host_waited(const Clock& clock);
  // Books the accesses of the work just issued; tells `report` of each earlier one that it conflicts with and isn't ordered after.
  void access(size_t stream, const std::string& name, const std::vector<Access>& accesses,
              const std::function<void(const std::string&)>& report);
  // The same of what the host itself does there now, which is ordered after all that it has waited for.
  void host_access(const std::string& name, const std::vector<Access>& accesses,
                   const std::function<void(const std::string&)>& report) const;
  // Whether the host has waited for all that streams were to write there.
  bool host_knows_writes(uintptr_t begin, uintptr_t end) const;
  // Forgets what is known of these bytes: host memory that went, device memory given back to the system.
  void forget(uintptr_t begin, uintptr_t end);

 private:
  struct Use {
    size_t stream;
    uint64_t number;
    std::string name;
  };
  struct Range {
    uintptr_t end;
    bool written = false;
    Use writer{};
    std::vector<Use> readers{};  // since the last write, one per stream
  };
  bool knows(size_t stream, const Use& use);
  bool host_knows(const Use& use) const { return use.stream < host_.size() && host_[use.stream] >= use.number; }
  void split(uintptr_t at);

  std::vector<Clock> clocks_;
  Clock host_;
  std::map<uintptr_t, Range> ranges_;  // by first byte; disjoint
};

}  // namespace late
