#include "mt19937.hpp"

namespace zinf {
namespace {

constexpr std::size_t words = Mt19937::words;
constexpr std::size_t middle = 397;
constexpr std::size_t apart = words - middle;

std::uint32_t twist(std::uint32_t first, std::uint32_t second) {
    const std::uint32_t mixed = (first & 0x80000000u) | (second & 0x7fffffffu);
    return (mixed >> 1) ^ ((0u - (second & 1u)) & 0x9908b0dfu);
}

// Each word is made of one that is `apart` before it, counted round the end: within so many, none depends on another. GCC is told
// so, and then uses vectors.
void advance(std::uint32_t* state) {
    for (std::size_t i = 0; i < apart; ++i) state[i] = state[i + middle] ^ twist(state[i], state[i + 1]);
#pragma GCC ivdep
    for (std::size_t i = apart; i < 2 * apart; ++i) state[i] = state[i - apart] ^ twist(state[i], state[i + 1]);
#pragma GCC ivdep
    for (std::size_t i = 2 * apart; i < words - 1; ++i) state[i] = state[i - apart] ^ twist(state[i], state[i + 1]);
    state[words - 1] = state[words - 1 - apart] ^ twist(state[words - 1], state[0]);
}

}  // namespace

void Mt19937::skip(std::uint64_t count) {
    while (count > words - used_) {
        count -= words - used_;
        advance(state_.data());
        used_ = 0;
    }
    used_ += static_cast<std::size_t>(count);
}

}  // namespace zinf
