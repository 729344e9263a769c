// What the device counts: host waits, blocking copies, waits of unrecorded events and other defects, each with where it came from.
// Owned by Device; any thread may call.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace late {

struct Defect {
  std::string kind;    // of the counter
  std::string detail;  // operators and streams
};

class Counters {
 public:
  // Adds one to `name`; `detail` is counted beside it under "name: detail".
  void add(std::string_view name, std::string_view detail = {});
  // Counts a defect and keeps its text; only the first thousand texts are kept.
  void defect(std::string_view kind, std::string detail);
  std::map<std::string, int64_t> all() const;
  std::vector<Defect> defects() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
  std::vector<Defect> defects_;
};

}  // namespace late
