#include "order.hpp"

#include <algorithm>
#include <set>

namespace late {

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

const Clock& Order::clock(size_t stream) {
  if (clocks_.size() <= stream) clocks_.resize(stream + 1);
  Clock& clock = clocks_[stream];
  if (clock.size() <= stream) clock.resize(stream + 1, 0);
  return clock;
}

void Order::issue(size_t stream) {
  clock(stream);
  ++clocks_[stream][stream];
  join(clocks_[stream], host_);
}

void Order::stream_waited(size_t stream, const Clock& waited) {
  clock(stream);
  join(clocks_[stream], waited);
}

void Order::host_waited(const Clock& clock) { join(host_, clock); }

bool Order::knows(size_t stream, const Use& use) {
  const Clock& clock = clocks_[stream];
  return use.stream == stream || (use.stream < clock.size() && clock[use.stream] >= use.number);
}

void Order::split(uintptr_t at) {
  auto after = ranges_.upper_bound(at);
  if (after == ranges_.begin()) return;
  auto around = std::prev(after);
  if (around->first == at || around->second.end <= at) return;
  Range upper = around->second;
  around->second.end = at;
  ranges_.emplace(at, std::move(upper));
}

void Order::access(size_t stream, const std::string& name, const std::vector<Access>& accesses,
                   const std::function<void(const std::string&)>& report) {
  const Use now{stream, clock(stream)[stream], name};
  std::set<std::pair<size_t, uint64_t>> reported;  // one report for each pair of works, however much they share
  auto check = [&](const Use& before, const char* did, const char* does) {
    if (knows(stream, before) || !reported.emplace(before.stream, before.number).second) return;
    report(name + " on stream " + std::to_string(stream) + " " + does + " what " + before.name + " on stream " +
           std::to_string(before.stream) + " " + did);
  };
  for (const Access& access : accesses) {
    if (access.begin >= access.end) continue;
    split(access.begin);
    split(access.end);
    uintptr_t at = access.begin;
    auto range = ranges_.lower_bound(at);
    while (at < access.end) {
      if (range == ranges_.end() || range->first > at) {  // nothing known of these bytes yet
        const uintptr_t end = range == ranges_.end() ? access.end : std::min(access.end, range->first);
        range = ranges_.emplace_hint(range, at, Range{end});
      }
      Range& known = range->second;
      if (known.written) check(known.writer, "writes", access.write ? "writes" : "reads");
      if (access.write) {
        for (const Use& reader : known.readers) check(reader, "reads", "writes");
      } else {
        auto mine = std::find_if(known.readers.begin(), known.readers.end(), [&](const Use& use) { return use.stream == stream; });
        if (mine == known.readers.end())
          known.readers.push_back(now);
        else
          *mine = now;
      }
      at = known.end;
      ++range;
    }
    if (access.write) {
      ranges_.erase(ranges_.lower_bound(access.begin), ranges_.lower_bound(access.end));
      ranges_[access.begin] = Range{access.end, true, now, {}};
    }
  }
}

void Order::host_access(const std::string& name, const std::vector<Access>& accesses,
                        const std::function<void(const std::string&)>& report) const {
  std::set<std::pair<size_t, uint64_t>> reported;
  auto check = [&](const Use& before, const char* did, const char* does) {
    if (host_knows(before) || !reported.emplace(before.stream, before.number).second) return;
    report(name + " on the host " + does + " what " + before.name + " on stream " + std::to_string(before.stream) + " " + did);
  };
  for (const Access& access : accesses) {
    auto range = ranges_.upper_bound(access.begin);
    if (range != ranges_.begin()) --range;
    for (; range != ranges_.end() && range->first < access.end; ++range) {
      const Range& known = range->second;
      if (known.end <= access.begin) continue;
      if (known.written) check(known.writer, "writes", access.write ? "writes" : "reads");
      if (access.write) {
        for (const Use& reader : known.readers) check(reader, "reads", "writes");
      }
    }
  }
}

bool Order::host_knows_writes(uintptr_t begin, uintptr_t end) const {
  auto range = ranges_.upper_bound(begin);
  if (range != ranges_.begin()) --range;
  for (; range != ranges_.end() && range->first < end; ++range) {
    const Use& writer = range->second.writer;
    if (range->second.end <= begin || !range->second.written) continue;
    if (!host_knows(writer)) return false;
  }
  return true;
}

void Order::forget(uintptr_t begin, uintptr_t end) {
  split(begin);
  split(end);
  ranges_.erase(ranges_.lower_bound(begin), ranges_.lower_bound(end));
}

}  // namespace late
