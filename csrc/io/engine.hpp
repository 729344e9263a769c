// The asynchronous I/O engine: submit a transfer, wait for it or ask whether it is done, close.
//
// Ownership: the engine owns its I/O threads and its ring. A Pending keeps what it needs alive, whatever becomes of the
// engine. The caller keeps a transfer's memory and descriptor until it is done.
// Threads: any thread may call anything, at the same time; only destroying needs the last reference. A forked child may
// call forked(), name() and the destructors, which do nothing there: everything else throws Forked.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/types.h>

#include "backend.hpp"
#include "request_queue.hpp"
#include "system_calls.hpp"
#include "transfer.hpp"

namespace zinf {

enum class Kind { automatic, io_uring, threads };

struct Settings {
    Kind kind = Kind::automatic;
    unsigned depth = 32;                      // chunks under way at a time
    std::size_t chunk_bytes = std::size_t{1} << 20;
    double bandwidth = 0;                     // bytes per second, reads and writes together; 0 is no limit
};

struct Forked : std::logic_error {
    Forked() : std::logic_error("this I/O engine belongs to the process that made it, not to its forked child") {}
};

struct Closed : std::logic_error {
    Closed() : std::logic_error("this I/O engine is closed") {}
};

// A submitted transfer.
class Pending {
public:
    Pending(std::shared_ptr<RequestQueue> requests, std::shared_ptr<Request> request, pid_t process);
    std::uint64_t number() const { return request_->number; }
    bool done() const;
    bool wait_for(std::chrono::milliseconds patience) const;  // whether it is done by then
    Outcome outcome() const;                                  // once done

private:
    std::shared_ptr<RequestQueue> requests_;
    std::shared_ptr<Request> request_;
    pid_t process_;
};

class Engine {
public:
    // Throws std::system_error where io_uring is asked for by name and refused.
    explicit Engine(const Settings& settings, std::shared_ptr<SystemCalls> calls = std::make_shared<SystemCalls>());
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    Pending submit(const Transfer& transfer);     // throws Closed
    std::vector<std::uint64_t> take_finished();   // numbers of the transfers done since the last call
    Counters counters() const;
    void close();                                 // waits for everything submitted; again is nothing

    Kind kind() const { return kind_; }
    const std::string& reason() const { return reason_; }  // why not io_uring, if it was tried
    int broken() const;  // the errno with which io_uring refused to go on, since when threads move the bytes; 0 if it didn't
    bool forked() const;

private:
    void check_process() const;

    const pid_t process_;
    Kind kind_;
    std::string reason_;
    std::shared_ptr<RequestQueue> requests_;
    mutable std::mutex mutex_;  // guards what follows
    std::unique_ptr<Backend> backend_;
    bool started_ = false;
};

}  // namespace zinf
