// A faulty kernel beneath the engine: it moves less than asked, is interrupted, has full queues, fails, and completes the entries
// of a ring late and in any order.
//
// Ownership: owns the memory of the ring it simulates; one ring for each instance.
// Threads: read and write from any thread; the ring from one thread at a time, as the kernel's own.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <random>
#include <vector>

#include <linux/io_uring.h>

#include "io/system_calls.hpp"

namespace zinf::tests {

struct Faults {
    unsigned percent_short = 0;
    unsigned percent_interrupted = 0;
    unsigned percent_no_room = 0;               // EAGAIN
    bool never_room = false;
    std::optional<std::uint64_t> fails_at;      // what begins at this offset or spans it fails, with `error`
    int error = 0;
    std::size_t alignment = 1;                  // EINVAL for offsets that are no multiple
    int setup_error = 0;
    unsigned enters = ~0U;                      // how often the ring may be entered, until that is forbidden
    bool old = false;                           // a ring of the first kernels that had them
};

class FaultyKernel final : public SystemCalls {
public:
    explicit FaultyKernel(const Faults& faults, unsigned seed = 1) : faults_(faults), dice_(seed) {}

    ssize_t read(int fd, std::byte* into, std::size_t bytes, std::uint64_t offset) override;
    ssize_t write(int fd, const std::byte* from, std::size_t bytes, std::uint64_t offset) override;
    int ring_setup(unsigned entries, io_uring_params& params) override;
    int ring_enter(int ring, unsigned submit, unsigned wait_for) override;
    void* ring_map(int ring, std::size_t bytes, std::uint64_t what) override;
    void ring_unmap(void*, std::size_t) override {}

private:
    using Clock = std::chrono::steady_clock;
    struct Waiting {
        io_uring_sqe entry;
        Clock::time_point until;  // of a time-out
    };

    bool happens(unsigned percent);
    ssize_t fault(std::size_t& bytes, std::uint64_t offset);  // -errno, or 0 after perhaps making `bytes` fewer
    void consume(unsigned entries);
    void complete(bool all);
    std::optional<std::int32_t> try_entry(const Waiting& waiting);
    void rest();
    std::uint32_t& number(std::uint32_t offset);

    const Faults faults_;
    std::mutex mutex_;  // guards dice_
    std::mt19937 dice_;
    io_uring_params params_{};
    std::vector<std::uint64_t> queues_;
    std::vector<io_uring_sqe> entries_;
    std::vector<Waiting> waiting_;
    unsigned entered_ = 0;
};

}  // namespace zinf::tests
