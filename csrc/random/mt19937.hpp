// The random numbers that PyTorch makes on the CPU, bit by bit, many at a time: MT19937's, and of these uniform and normal ones.
//
// Ownership: a stream owns its state; memory to fill is the caller's.
// Threads: one at a time may use a stream.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace zinf {

enum class BFloat16 : std::uint16_t {};  // the upper half of a float's bits

class Mersenne {
public:
    static constexpr std::size_t words = 624;
    using State = std::array<std::uint32_t, words>;

    // The stream whose next number is number `used` of this state: 624 where all are used up.
    Mersenne(const State& state, std::size_t used) : state_(state), used_(used) {}

    const State& state() const { return state_; }
    std::size_t used() const { return used_; }

    // Passes over as many numbers.
    void skip(std::uint64_t count);

    // Fills: with numbers in [first, second), each made of one of MT19937's; or with normal ones of mean `first` and standard
    // deviation `second`, by Box and Muller's method, 16 of 16 of MT19937's: then the size is a multiple of 16.
    enum class Kind { uniform, normal };
    void make(Kind kind, std::span<float> into, float first, float second);
    void make(Kind kind, std::span<BFloat16> into, float first, float second);

private:
    void refill();
    void draw(std::span<std::uint32_t> into);

    State state_;
    std::size_t used_;
};

}  // namespace zinf
