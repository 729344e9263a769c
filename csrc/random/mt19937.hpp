// The state of the generator that PyTorch draws from on the CPU, MT19937, and how to pass over its numbers.
//
// Ownership: a value.
// Threads: one at a time may change it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace zinf {

class Mt19937 {
public:
    static constexpr std::size_t words = 624;
    using State = std::array<std::uint32_t, words>;

    // The generator whose next number is number `used` of this state: 624 where all are used up.
    Mt19937(const State& state, std::size_t used) : state_(state), used_(used) {}

    const State& state() const { return state_; }
    std::size_t used() const { return used_; }

    // Passes over as many numbers.
    void skip(std::uint64_t count);

private:
    State state_;
    std::size_t used_;
};

}  // namespace zinf
