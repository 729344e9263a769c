#include "request_queue.hpp"

#include <utility>

namespace zinf {

namespace {

double seconds(Clock::time_point when) { return std::chrono::duration<double>(when.time_since_epoch()).count(); }

}  // namespace

std::shared_ptr<Request> RequestQueue::add(const Transfer& transfer) {
    const std::lock_guard locked(mutex_);
    if (!accepting_) return nullptr;
    auto request = std::make_shared<Request>(counters_.requests++, transfer, chunk_bytes_);
    ++counters_.in_flight;
    if (request->done()) {  // no bytes
        complete(*request);
    } else {
        queue_.push_back(request);
        added_.notify_one();  // who takes a chunk wakes the next, while there are more
    }
    return request;
}

bool RequestQueue::done(const Request& request) const {
    const std::lock_guard locked(mutex_);
    return request.done();
}

bool RequestQueue::wait_for(const Request& request, std::chrono::milliseconds patience) const {
    std::unique_lock locked(mutex_);
    return finished_.wait_for(locked, patience, [&] { return request.done(); });
}

Outcome RequestQueue::outcome(const Request& request) const {
    const std::lock_guard locked(mutex_);
    return request.outcome;
}

Counters RequestQueue::counters() const {
    const std::lock_guard locked(mutex_);
    return counters_;
}

std::vector<std::uint64_t> RequestQueue::take_finished() {
    const std::lock_guard locked(mutex_);
    return std::exchange(finished_numbers_, {});
}

void RequestQueue::stop_accepting() {
    const std::lock_guard locked(mutex_);
    accepting_ = false;
}

void RequestQueue::wait_for_all() const {
    std::unique_lock locked(mutex_);
    finished_.wait(locked, [&] { return counters_.in_flight == 0; });
}

void RequestQueue::end() {
    const std::lock_guard locked(mutex_);
    ended_ = true;
    added_.notify_all();
}

RequestQueue::Taken RequestQueue::try_take() {
    const std::lock_guard locked(mutex_);
    return take_locked();
}

RequestQueue::Taken RequestQueue::take_locked() {
    if (queue_.empty()) return {.chunk = {}, .not_before = {}, .ended = ended_};
    const auto now = Clock::now();
    auto& begins = queue_.front()->outcome.began;  // a transfer that waits for bandwidth is one that a slower drive is busy with
    if (begins == 0) begins = seconds(now);
    if (now < rate_limiter_.next()) return {.chunk = {}, .not_before = rate_limiter_.next(), .ended = false};
    const auto request = queue_.front();
    Taken taken{.chunk = request->cut_next(request), .not_before = {}, .ended = false};
    rate_limiter_.spend(taken.chunk->transfer.bytes, now);
    if (request->all_cut()) queue_.pop_front();
    if (!queue_.empty()) added_.notify_one();
    return taken;
}

std::optional<Chunk> RequestQueue::take() {
    std::unique_lock locked(mutex_);
    while (true) {
        Taken taken = take_locked();
        if (taken.chunk || taken.ended) return std::move(taken.chunk);
        if (taken.not_before) {
            added_.wait_until(locked, *taken.not_before);
        } else {
            added_.wait(locked);
        }
    }
}

void RequestQueue::finish(const Chunk& chunk) {
    const std::lock_guard locked(mutex_);
    Request& request = *chunk.request;
    request.take(chunk);
    if (chunk.error != 0 && !request.all_cut()) {
        request.give_up();
        std::erase(queue_, chunk.request);
    }
    (request.transfer.write ? counters_.bytes_written : counters_.bytes_read) += chunk.moved;
    if (request.done()) complete(request);
}

void RequestQueue::complete(Request& request) {
    request.outcome.over = seconds(Clock::now());
    if (request.cut == 0) request.outcome.began = request.outcome.over;  // no bytes
    finished_numbers_.push_back(request.number);
    --counters_.in_flight;
    finished_.notify_all();
}

}  // namespace zinf
