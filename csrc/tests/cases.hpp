// The table of cases that every engine passes.
//
// Ownership: a case gets a maker of engines and owns what it makes.
// Threads: one case at a time, from main.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include "io/engine.hpp"

namespace zinf::tests {

using MakeEngine = std::function<std::unique_ptr<Engine>(Settings)>;

struct Case {
    const char* name;
    void (*run)(const MakeEngine&);
};

std::span<const Case> cases();

// Cases with faults of their own: each sets up its kernel.
void run_fault_cases(Kind kind);
void run_crc32c_cases();

inline void wait(const Pending& pending) {
    while (!pending.wait_for(std::chrono::seconds(1))) continue;
}

inline Outcome result(const Pending& pending) {
    wait(pending);
    return pending.outcome();
}

}  // namespace zinf::tests
