// Compiled without contraction of products and sums (see CMakeLists.txt): where PyTorch's code has one operation for both, there
// is one here, and nowhere else.
#include "mt19937.hpp"

#include <algorithm>
#include <bit>
#include <limits>

namespace zinf {
namespace {

constexpr std::size_t words = Mersenne::words;
constexpr std::size_t middle = 397;
constexpr std::size_t apart = words - middle;

// A loop over a block of numbers, as one function with one argument: it is compiled several times, for what processors have.
struct Work {
    enum class Kind { next_state, temper, uniform, normal, narrow };
    Kind kind;
    const void* from;
    void* into;
    std::size_t count;
    float first = 0;
    float second = 0;
};

[[gnu::always_inline]] inline std::uint32_t twist(std::uint32_t first, std::uint32_t second) {
    const std::uint32_t mixed = (first & 0x80000000u) | (second & 0x7fffffffu);
    return (mixed >> 1) ^ ((0u - (second & 1u)) & 0x9908b0dfu);
}

// Each word is made of one that is `apart` before it, counted round the end: within so many, none depends on another.
[[gnu::always_inline]] inline void next_state(std::uint32_t* state) {
    for (std::size_t i = 0; i < apart; ++i) state[i] = state[i + middle] ^ twist(state[i], state[i + 1]);
#pragma GCC ivdep
    for (std::size_t i = apart; i < 2 * apart; ++i) state[i] = state[i - apart] ^ twist(state[i], state[i + 1]);
#pragma GCC ivdep
    for (std::size_t i = 2 * apart; i < words - 1; ++i) state[i] = state[i - apart] ^ twist(state[i], state[i + 1]);
    state[words - 1] = state[words - 1 - apart] ^ twist(state[words - 1], state[0]);
}

[[gnu::always_inline]] inline void temper(const std::uint32_t* state, std::size_t count, std::uint32_t* into) {
    for (std::size_t i = 0; i < count; ++i) {
        std::uint32_t word = state[i];
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c5680u;
        word ^= (word << 15) & 0xefc60000u;
        into[i] = word ^ (word >> 18);
    }
}

[[gnu::always_inline]] inline std::uint16_t narrow(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// In [0, 1): a multiple of 2^-24.
[[gnu::always_inline]] inline float fraction(std::uint32_t number) {
    return static_cast<float>(static_cast<std::int32_t>(number & 0xffffffu)) * 0x1p-24f;
}

[[gnu::always_inline]] inline void uniform(const std::uint32_t* numbers, std::size_t count, float* into, float from, float to) {
    const float range = to - from;
    for (std::size_t i = 0; i < count; ++i) {
        const float value = __builtin_fmaf(fraction(numbers[i]), range, from);
        into[i] = value == to ? from : value;  // rounded up to what is outside the interval
    }
}

// Of uniform numbers again: what is `outside` once it is rounded becomes `instead`.
[[gnu::always_inline]] inline void narrow(const float* values, std::size_t count, std::uint16_t* into, float instead,
                                          float outside) {
    const std::uint16_t lowest = narrow(instead);
    const std::uint16_t highest = narrow(outside);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint16_t value = narrow(values[i]);
        into[i] = value == highest ? lowest : value;
    }
}

// The natural logarithm in (0, 1], as Cephes computes it.
[[gnu::always_inline]] inline float log_of(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    float exponent = static_cast<float>(static_cast<std::int32_t>(bits >> 23) - 0x7e);
    x = std::bit_cast<float>((bits & 0x7fffffu) | 0x3f000000u);
    const bool small = x < 0.707106781186547524f;
    const float again = small ? x : 0.0f;
    exponent -= small ? 1.0f : 0.0f;
    x = x - 1.0f + again;
    const float z = x * x;
    float y = 7.0376836292e-2f;
    y = __builtin_fmaf(y, x, -1.1514610310e-1f);
    y = __builtin_fmaf(y, x, 1.1676998740e-1f);
    y = __builtin_fmaf(y, x, -1.2420140846e-1f);
    y = __builtin_fmaf(y, x, 1.4249322787e-1f);
    y = __builtin_fmaf(y, x, -1.6668057665e-1f);
    y = __builtin_fmaf(y, x, 2.0000714765e-1f);
    y = __builtin_fmaf(y, x, -2.4999993993e-1f);
    y = __builtin_fmaf(y, x, 3.3333331174e-1f);
    y = __builtin_fmaf(y * x, z, exponent * -2.12194440e-4f);
    return __builtin_fmaf(exponent, 0.693359375f, x + (y - z * 0.5f));
}

struct SineCosine {
    float sine;
    float cosine;
};

// Both of an angle in [0, 2 pi), as Cephes computes them.
[[gnu::always_inline]] inline SineCosine sine_cosine_of(float x) {
    const std::int32_t octant = (static_cast<std::int32_t>(x * 1.27323954473516f) + 1) & ~1;
    const float y = static_cast<float>(octant);
    const std::uint32_t sine_sign = static_cast<std::uint32_t>(octant & 4) << 29;
    const std::uint32_t cosine_sign = static_cast<std::uint32_t>(~(octant - 2) & 4) << 29;
    x = __builtin_fmaf(y, -0.78515625f, x);
    x = __builtin_fmaf(y, -2.4187564849853515625e-4f, x);
    x = __builtin_fmaf(y, -3.77489497744594108e-8f, x);
    const float z = x * x;
    float p = 2.443315711809948e-5f;
    p = __builtin_fmaf(p, z, -1.388731625493765e-3f);
    p = __builtin_fmaf(p, z, 4.166664568298827e-2f);
    p = __builtin_fmaf(p * z, z, -(z * 0.5f)) + 1.0f;
    float q = -1.9515295891e-4f;
    q = __builtin_fmaf(q, z, 8.3321608736e-3f);
    q = __builtin_fmaf(q, z, -1.6666654611e-1f);
    q = __builtin_fmaf(q * z, x, x);
    const bool straight = (octant & 2) == 0;
    return {std::bit_cast<float>(std::bit_cast<std::uint32_t>(straight ? q : p) ^ sine_sign),
            std::bit_cast<float>(std::bit_cast<std::uint32_t>(straight ? p : q) ^ cosine_sign)};
}

[[gnu::always_inline]] inline void normal(const std::uint32_t* numbers, std::size_t count, float* into, float mean,
                                          float deviation) {
    constexpr float whole_turn = static_cast<float>(2.0 * 3.14159265358979323846);
    for (std::size_t group = 0; group < count; group += 16) {
        for (std::size_t i = group; i < group + 8; ++i) {
            const float radius = __builtin_sqrtf(-2.0f * log_of(1.0f - fraction(numbers[i])));
            const SineCosine angle = sine_cosine_of(whole_turn * fraction(numbers[i + 8]));
            into[i] = __builtin_fmaf(radius * angle.cosine, deviation, mean);
            into[i + 8] = __builtin_fmaf(radius * angle.sine, deviation, mean);
        }
    }
}

[[gnu::always_inline]] inline void perform(const Work& w) {
    const auto* numbers = static_cast<const std::uint32_t*>(w.from);
    switch (w.kind) {
        case Work::Kind::next_state: return next_state(static_cast<std::uint32_t*>(w.into));
        case Work::Kind::temper: return temper(numbers, w.count, static_cast<std::uint32_t*>(w.into));
        case Work::Kind::uniform: return uniform(numbers, w.count, static_cast<float*>(w.into), w.first, w.second);
        case Work::Kind::normal: return normal(numbers, w.count, static_cast<float*>(w.into), w.first, w.second);
        case Work::Kind::narrow:
            return narrow(static_cast<const float*>(w.from), w.count, static_cast<std::uint16_t*>(w.into), w.first, w.second);
    }
}

void perform_anywhere(const Work& work) { perform(work); }
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void perform_with_avx2(const Work& work) { perform(work); }
__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,fma"))) void perform_with_avx512(const Work& work) { perform(work); }
#endif

using Way = void (*)(const Work&);

Way choose_way() {
#if defined(__x86_64__)
    const bool fused = __builtin_cpu_supports("fma");
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (fused && wide) return perform_with_avx512;
    if (fused && __builtin_cpu_supports("avx2")) return perform_with_avx2;
#endif
    return perform_anywhere;
}

void start(const Work& work) {
    static const Way way = choose_way();
    way(work);
}

constexpr std::size_t block = words;  // made at a time: whole groups of 16

}  // namespace

void Mersenne::refill() {
    start({Work::Kind::next_state, nullptr, state_.data(), words});
    used_ = 0;
}

void Mersenne::skip(std::uint64_t count) {
    while (count > words - used_) {
        count -= words - used_;
        refill();
    }
    used_ += static_cast<std::size_t>(count);
}

void Mersenne::draw(std::span<std::uint32_t> into) {
    while (!into.empty()) {
        if (used_ == words) refill();
        const std::size_t count = std::min(into.size(), words - used_);
        start({Work::Kind::temper, state_.data() + used_, into.data(), count});
        used_ += count;
        into = into.subspan(count);
    }
}

void Mersenne::make(Kind kind, std::span<float> into, float first, float second) {
    std::array<std::uint32_t, block> numbers;
    while (!into.empty()) {
        const std::size_t count = std::min(into.size(), block);
        draw(std::span(numbers).first(count));
        start({kind == Kind::uniform ? Work::Kind::uniform : Work::Kind::normal, numbers.data(), into.data(), count, first, second});
        into = into.subspan(count);
    }
}

void Mersenne::make(Kind kind, std::span<BFloat16> into, float first, float second) {
    std::array<float, block> values;
    const float nothing = std::numeric_limits<float>::quiet_NaN();
    while (!into.empty()) {
        const std::size_t count = std::min(into.size(), block);
        make(kind, std::span(values).first(count), first, second);
        start({Work::Kind::narrow, values.data(), into.data(), count, first, kind == Kind::uniform ? second : nothing});
        into = into.subspan(count);
    }
}

}  // namespace zinf
