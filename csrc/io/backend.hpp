// The I/O threads behind an engine: they take chunks from RequestQueue and move them. One file per backend.
//
// Ownership: an instance owns its threads and kernel objects; destroying it ends them, after RequestQueue::end().
// Threads: made, told of work and destroyed by the engine, one call at a time.
#pragma once

#include <memory>

#include "request_queue.hpp"
#include "system_calls.hpp"

namespace zinf {

class Backend {
public:
    Backend() = default;
    virtual ~Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;

    // Starts the threads. Called once, before the first transfer.
    virtual void start() = 0;

    // There is something new in RequestQueue: a request or its end.
    virtual void notify() = 0;

    // The errno with which the kernel refused to go on, since when threads move the chunks; 0 if it didn't. Any thread may ask.
    virtual int broken() const { return 0; }
};

// Moves what is left of a chunk by system calls, and sums its bytes.
void move_by_calls(Chunk& chunk, SystemCalls& calls);

// A pool of threads, each with a system call under way.
std::unique_ptr<Backend> make_thread_backend(std::shared_ptr<RequestQueue> requests, std::shared_ptr<SystemCalls> calls, unsigned depth);

// One thread with an io_uring. Throws std::system_error where that is refused.
std::unique_ptr<Backend> make_io_uring_backend(std::shared_ptr<RequestQueue> requests, std::shared_ptr<SystemCalls> calls, unsigned depth);

}  // namespace zinf
