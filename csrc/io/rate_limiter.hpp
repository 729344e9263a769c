// A token bucket: says when the next transfer may begin so that a bandwidth is not exceeded.
//
// Ownership: nothing.
// Threads: no locks of its own; RequestQueue guards it with its mutex.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>

namespace zinf {

using Clock = std::chrono::steady_clock;

class RateLimiter {
public:
    // In bytes per second; 0 is no limit.
    explicit RateLimiter(double bandwidth) : bandwidth_(bandwidth) {}

    // Whoever has to wait until then asks again.
    Clock::time_point next() const { return next_; }

    // Begins a transfer of that size at `now`, which is not before next(). Time that went by unused is lost: there is no burst.
    void spend(std::size_t bytes, Clock::time_point now) {
        if (bandwidth_ <= 0) return;
        const std::chrono::duration<double> time(static_cast<double>(bytes) / bandwidth_);
        next_ = std::max(next_, now - grace) + std::chrono::duration_cast<Clock::duration>(time);
    }

private:
    static constexpr std::chrono::milliseconds grace{1};  // how late a thread may wake without losing bandwidth

    double bandwidth_;
    Clock::time_point next_{};
};

}  // namespace zinf
