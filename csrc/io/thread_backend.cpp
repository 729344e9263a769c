// A pool of threads with preadv and pwritev.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "backend.hpp"

namespace zinf {
namespace {

constexpr unsigned most_threads = 16;
constexpr std::chrono::milliseconds pause{1};

ssize_t call(const Chunk& chunk, SystemCalls& calls) {
    const int fd = chunk.transfer.fd;
    return chunk.transfer.write ? calls.write(fd, chunk.address(), chunk.left(), chunk.offset())
                                : calls.read(fd, chunk.address(), chunk.left(), chunk.offset());
}

class ThreadBackend final : public Backend {
public:
    ThreadBackend(std::shared_ptr<RequestQueue> requests, std::shared_ptr<SystemCalls> calls, unsigned depth)
        : requests_(std::move(requests)), calls_(std::move(calls)), count_(std::min(depth, most_threads)) {}

    void start() override {
        threads_.reserve(count_);
        while (threads_.size() < count_) threads_.emplace_back([this] { run(); });
    }

    void notify() override {}  // RequestQueue wakes who waits in take()

private:
    void run() {
        while (auto chunk = requests_->take()) {
            move_by_calls(*chunk, *calls_);
            requests_->finish(*chunk);
        }
    }

    std::shared_ptr<RequestQueue> requests_;
    std::shared_ptr<SystemCalls> calls_;
    unsigned count_;
    std::vector<std::jthread> threads_;  // last, so that they end first
};

}  // namespace

void move_by_calls(Chunk& chunk, SystemCalls& calls) {
    if (chunk.transfer.write) update_checksum(chunk);
    for (Next next = Next::again; next != Next::finished; next = advance(chunk, call(chunk, calls))) {
        if (next == Next::later) std::this_thread::sleep_for(pause);
    }
    if (!chunk.transfer.write && chunk.error == 0) update_checksum(chunk);
}

std::unique_ptr<Backend> make_thread_backend(std::shared_ptr<RequestQueue> requests, std::shared_ptr<SystemCalls> calls,
                                         unsigned depth) {
    return std::make_unique<ThreadBackend>(std::move(requests), std::move(calls), depth);
}

}  // namespace zinf
