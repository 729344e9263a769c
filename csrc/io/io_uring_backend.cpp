// One thread with an io_uring: it submits chunks, sums bytes while the kernel moves others, and records the results. Where the
// kernel refuses to go on with the ring, threads take its place.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <sys/eventfd.h>

#include "backend.hpp"
#include "file_descriptor.hpp"
#include "io_uring.hpp"

namespace zinf {
namespace {

constexpr std::chrono::milliseconds pause{1};
constexpr std::size_t largest = std::size_t{1} << 30;  // an entry's length has 32 bits, and its result a sign

// Values of an entry's user_data that are no chunk's index.
constexpr std::uint64_t notified = ~std::uint64_t{0};
constexpr std::uint64_t time_passed = ~std::uint64_t{1};
constexpr unsigned extra_entries = 2;

class IoUringBackend final : public Backend {
public:
    IoUringBackend(std::shared_ptr<RequestQueue> requests, std::shared_ptr<SystemCalls> calls, unsigned depth)
        : requests_(std::move(requests)),
          calls_(std::move(calls)),
          event_(::eventfd(0, EFD_CLOEXEC)),
          ring_(calls_, depth + extra_entries),
          under_way_(depth) {
        if (!event_.is_open()) throw std::system_error(errno, std::system_category(), "eventfd");
        for (std::size_t place = depth; place > 0; --place) free_.push_back(place - 1);
        try_out();
    }

    void start() override {
        if (!thread_.joinable()) thread_ = std::jthread([this] { run(); });
    }

    void notify() override { ::eventfd_write(event_.get(), 1); }

    int broken() const override { return broken_; }

private:
    // A filter may allow to set up a ring but not to use it.
    void try_out() {
        io_uring_sqe nothing{};
        nothing.opcode = IORING_OP_NOP;
        ring_.push(nothing);
        int error;
        do {
            error = -ring_.enter(1);
        } while (error == EINTR);
        if (error != 0) throw std::system_error(error, std::system_category(), "io_uring_enter");
        if (!ring_.pop()) throw std::system_error(EIO, std::system_category(), "io_uring_enter");
    }

    bool idle() const { return free_.size() == under_way_.size() && resumed_.empty() && arrived_.empty(); }

    void run() {
        while (true) {
            fill();
            if (ended_ && idle() && !listening_) return;
            if (!ended_) listen();
            // Sums are made while the kernel is busy: what has room there is submitted first.
            enter(to_check_.empty() && arrived_.empty() ? 1 : 0);
            sum();
            while (const auto completion = ring_.pop()) take(*completion);
            if (broken_ != 0) return go_on_with_threads();
        }
    }

    // The ring can't be entered any more. What wasn't submitted is moved by system calls; completions of the rest still arrive,
    // so that nothing is lost, or written by two at a time. This thread stays, for where no other can be made.
    void go_on_with_threads() {
        threads_ = make_thread_backend(requests_, calls_, static_cast<unsigned>(under_way_.size()));
        try {
            threads_->start();
        } catch (const std::system_error&) {  // those that were made go on
        }
        while (const auto withdrawn = ring_.withdraw()) {
            if (*withdrawn != notified && *withdrawn != time_passed) resumed_.push_back(leave(*withdrawn));
        }
        while (!idle()) {
            sum();
            while (const auto completion = ring_.pop()) take(*completion);
            if (resumed_.empty()) {
                std::this_thread::sleep_for(pause);
                continue;
            }
            move_by_calls(resumed_.front(), *calls_);
            requests_->finish(resumed_.front());
            resumed_.pop_front();
        }
        while (auto chunk = requests_->take()) {
            move_by_calls(*chunk, *calls_);
            requests_->finish(*chunk);
        }
    }

    // Takes a chunk out of its place.
    Chunk leave(std::size_t place) {
        Chunk chunk = std::move(*under_way_[place]);
        under_way_[place].reset();
        free_.push_back(place);
        return chunk;
    }

    void sum() {
        for (const std::size_t place : to_check_) update_checksum(*under_way_[place]);
        to_check_.clear();
        if (arrived_.empty()) return;
        update_checksum(arrived_.front());  // one at a time, so that others don't wait for room meanwhile
        requests_->finish(arrived_.front());
        arrived_.pop_front();
    }

    void fill() {
        if (Clock::now() < resume_at_) return wake_at(resume_at_);
        while (!free_.empty()) {
            if (!resumed_.empty()) {
                begin(std::move(resumed_.front()), false);
                resumed_.pop_front();
                continue;
            }
            auto taken = requests_->try_take();
            ended_ = taken.ended;
            if (taken.not_before) wake_at(*taken.not_before);
            if (!taken.chunk) return;
            begin(std::move(*taken.chunk), true);
        }
    }

    void begin(Chunk&& chunk, bool first) {
        const std::size_t place = free_.back();
        free_.pop_back();
        under_way_[place] = std::move(chunk);
        if (first && under_way_[place]->transfer.write && under_way_[place]->transfer.checksum) to_check_.push_back(place);
        push(place);
    }

    void push(std::size_t place) {
        const Chunk& chunk = *under_way_[place];
        io_uring_sqe entry{};
        entry.opcode = chunk.transfer.write ? IORING_OP_WRITE : IORING_OP_READ;
        entry.fd = chunk.transfer.fd;
        entry.off = chunk.offset();
        entry.addr = reinterpret_cast<std::uintptr_t>(chunk.address());
        entry.len = static_cast<std::uint32_t>(std::min(chunk.left(), largest));
        entry.user_data = place;
        ring_.push(entry);
    }

    // Reads the eventfd by an entry, which ends when notify() is called.
    void listen() {
        if (std::exchange(listening_, true)) return;
        io_uring_sqe entry{};
        entry.opcode = IORING_OP_READ;
        entry.fd = event_.get();
        entry.addr = reinterpret_cast<std::uintptr_t>(&event_count_);
        entry.len = sizeof event_count_;
        entry.user_data = notified;
        ring_.push(entry);
    }

    void wake_at(Clock::time_point when) {
        if (std::exchange(timing_, true)) return;
        const auto left = std::max<std::chrono::nanoseconds>(when - Clock::now(), std::chrono::nanoseconds(1));
        time_ = {.tv_sec = left / std::chrono::seconds(1), .tv_nsec = (left % std::chrono::seconds(1)).count()};
        io_uring_sqe entry{};
        entry.opcode = IORING_OP_TIMEOUT;
        entry.fd = -1;
        entry.addr = reinterpret_cast<std::uintptr_t>(&time_);
        entry.len = 1;
        entry.user_data = time_passed;
        ring_.push(entry);
    }

    void enter(unsigned wait_for) {
        const int error = -ring_.enter(wait_for);
        if (error == 0 || error == EINTR) return;
        if (error != EAGAIN && error != EBUSY) {
            broken_ = error;
            return;
        }
        std::this_thread::sleep_for(pause);
    }

    void take(const IoUring::Completion& completion) {
        if (completion.user_data == notified) {
            listening_ = false;
            return;
        }
        if (completion.user_data == time_passed) {
            timing_ = false;
            return;
        }
        Chunk chunk = leave(static_cast<std::size_t>(completion.user_data));
        switch (advance(chunk, completion.result)) {
            case Next::finished:
                if (!chunk.transfer.write && chunk.transfer.checksum && chunk.error == 0) {
                    arrived_.push_back(std::move(chunk));
                } else {
                    requests_->finish(chunk);
                }
                break;
            case Next::later:
                resume_at_ = Clock::now() + pause;
                [[fallthrough]];
            case Next::again:
                resumed_.push_back(std::move(chunk));
        }
    }

    std::shared_ptr<RequestQueue> requests_;
    std::shared_ptr<SystemCalls> calls_;
    FileDescriptor event_;
    IoUring ring_;
    std::vector<std::optional<Chunk>> under_way_;  // by place
    std::vector<std::size_t> free_;                // places
    std::vector<std::size_t> to_check_;              // places of writes that were just begun
    std::deque<Chunk> arrived_;                    // reads to be summed, then finished
    std::deque<Chunk> resumed_;                    // to go on with
    Clock::time_point resume_at_{};                // nothing is begun before that
    std::uint64_t event_count_ = 0;
    __kernel_timespec time_{};
    bool listening_ = false;
    bool timing_ = false;
    bool ended_ = false;
    std::atomic<int> broken_ = 0;
    std::unique_ptr<Backend> threads_;  // in place of the ring, once that is broken
    std::jthread thread_;             // last, so that it ends first
};

}  // namespace

std::unique_ptr<Backend> make_io_uring_backend(std::shared_ptr<RequestQueue> requests, std::shared_ptr<SystemCalls> calls, unsigned depth) {
    return std::make_unique<IoUringBackend>(std::move(requests), std::move(calls), depth);
}

}  // namespace zinf
