#include "counters.hpp"

namespace late {

void Counters::add(std::string_view name, std::string_view detail) {
  const std::lock_guard lock(mutex_);
  ++counts_[std::string(name)];
  if (!detail.empty()) ++counts_[std::string(name) + ": " + std::string(detail)];
}

void Counters::defect(std::string_view kind, std::string detail) {
  const std::lock_guard lock(mutex_);
  ++counts_[std::string(kind)];
  if (defects_.size() < 1000) defects_.push_back({std::string(kind), std::move(detail)});
}

std::map<std::string, int64_t> Counters::all() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

std::vector<Defect> Counters::defects() const {
  const std::lock_guard lock(mutex_);
  return defects_;
}

void Counters::clear() {
  const std::lock_guard lock(mutex_);
  counts_.clear();
  defects_.clear();
}

}  // namespace late
