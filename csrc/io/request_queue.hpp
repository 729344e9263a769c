// The queue of one engine's requests and their results, shared by the callers' threads and the I/O threads.
//
// Ownership: shared by the engine, its I/O threads and its requests. Refers to no I/O object.
// Threads: any thread may call anything; one mutex guards all.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "chunk.hpp"
#include "rate_limiter.hpp"
#include "request.hpp"

namespace zinf {

struct Counters {
    std::uint64_t bytes_read = 0;
    std::uint64_t bytes_written = 0;
    std::uint64_t requests = 0;   // submitted so far
    std::uint64_t in_flight = 0;  // requests that aren't done
};

class RequestQueue {
public:
    RequestQueue(std::size_t chunk_bytes, double bandwidth) : chunk_bytes_(chunk_bytes), rate_limiter_(bandwidth) {}

    // For callers.

    // Queues a transfer. nullptr after stop_accepting().
    std::shared_ptr<Request> add(const Transfer& transfer);
    bool done(const Request& request) const;
    bool wait_for(const Request& request, std::chrono::milliseconds patience) const;
    Outcome outcome(const Request& request) const;
    Counters counters() const;
    std::vector<std::uint64_t> take_finished();  // numbers of the requests done since the last call
    void stop_accepting();
    void wait_for_all() const;
    void end();  // take() and try_take() give nothing more; after wait_for_all()

    // For I/O threads.

    struct Taken {
        std::optional<Chunk> chunk;
        std::optional<Clock::time_point> not_before;  // there is a chunk, but the bandwidth is used up until then
        bool ended = false;                           // end() was called
    };
    Taken try_take();
    std::optional<Chunk> take();  // waits; nothing after end()
    void finish(const Chunk& chunk);

private:
    Taken take_locked();
    void complete(Request& request);

    const std::size_t chunk_bytes_;
    mutable std::mutex mutex_;
    mutable std::condition_variable added_;
    mutable std::condition_variable finished_;
    std::deque<std::shared_ptr<Request>> queue_;
    std::vector<std::uint64_t> finished_numbers_;
    RateLimiter rate_limiter_;
    Counters counters_;
    bool accepting_ = true;
    bool ended_ = false;
};

}  // namespace zinf
