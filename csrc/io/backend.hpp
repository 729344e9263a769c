// The I/O threads behind an engine: what takes chunks from Work and moves them. One file per way to do it.
//
// Ownership: an instance owns its threads and kernel objects; destroying it ends them, after Work::end().
// Threads: made, told of work and destroyed by the engine, one call at a time.
#pragma once

#include <memory>

#include "request_queue.hpp"
#include "system_calls.hpp"

namespace zinf {

class Mover {
public:
    Mover() = default;
    virtual ~Mover() = default;
    Mover(const Mover&) = delete;
    Mover& operator=(const Mover&) = delete;

    // Starts the threads. Called once, before the first transfer.
    virtual void start() = 0;

    // There is something new in Work: a request or its end.
    virtual void notify() = 0;

    // The errno with which the kernel refused to go on, since when threads move the chunks; 0 if it didn't. Any thread may ask.
    virtual int broken() const { return 0; }
};

// Moves what is left of a chunk by system calls, and sums its bytes.
void move_by_calls(Chunk& chunk, SystemCalls& calls);

// A pool of threads, each with a system call under way.
std::unique_ptr<Mover> make_thread_mover(std::shared_ptr<Work> work, std::shared_ptr<SystemCalls> calls, unsigned depth);

// One thread with an io_uring. Throws std::system_error where that is refused.
std::unique_ptr<Mover> make_ring_mover(std::shared_ptr<Work> work, std::shared_ptr<SystemCalls> calls, unsigned depth);

}  // namespace zinf
