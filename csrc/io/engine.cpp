#include "engine.hpp"

#include <system_error>
#include <utility>

#include <unistd.h>

namespace zinf {

Pending::Pending(std::shared_ptr<Work> work, std::shared_ptr<Request> request, pid_t process)
    : work_(std::move(work)), request_(std::move(request)), process_(process) {}

bool Pending::done() const {
    if (::getpid() != process_) throw Forked();
    return work_->done(*request_);
}

bool Pending::wait_for(std::chrono::milliseconds patience) const {
    if (::getpid() != process_) throw Forked();
    return work_->wait_for(*request_, patience);
}

Outcome Pending::outcome() const {
    if (::getpid() != process_) throw Forked();
    return work_->outcome(*request_);
}

Engine::Engine(const Settings& settings, std::shared_ptr<SystemCalls> calls)
    : process_(::getpid()),
      kind_(settings.kind),
      work_(std::make_shared<Work>(settings.chunk_bytes, settings.bandwidth)) {
    if (kind_ != Kind::threads) {
        try {
            mover_ = make_ring_mover(work_, calls, settings.depth);
            kind_ = Kind::io_uring;
        } catch (const std::system_error& refusal) {
            if (kind_ == Kind::io_uring) throw;
            reason_ = refusal.what();
        }
    }
    if (!mover_) {
        mover_ = make_thread_mover(work_, std::move(calls), settings.depth);
        kind_ = Kind::threads;
    }
}

Engine::~Engine() {
    if (!forked()) {
        close();
        return;
    }
    // The threads are the parent's, locks may be held by them for ever, and the ring is shared: all of it is left as it is.
    static_cast<void>(mover_.release());
    static_cast<void>(new std::shared_ptr<Work>(std::move(work_)));
}

Pending Engine::submit(const Transfer& transfer) {
    check_process();
    const std::lock_guard locked(mutex_);
    if (!mover_) throw Closed();
    if (!started_) mover_->start();
    started_ = true;
    auto request = work_->add(transfer);
    if (!request) throw Closed();
    mover_->notify();
    return {work_, std::move(request), process_};
}

std::vector<std::uint64_t> Engine::take_finished() {
    check_process();
    return work_->take_finished();
}

Counters Engine::counters() const {
    check_process();
    return work_->counters();
}

void Engine::close() {
    check_process();
    work_->stop_accepting();
    work_->wait_for_all();
    const std::lock_guard locked(mutex_);
    if (!mover_) return;
    work_->end();
    mover_->notify();
    mover_.reset();
}

int Engine::broken() const {
    check_process();
    const std::lock_guard locked(mutex_);
    return mover_ ? mover_->broken() : 0;
}

bool Engine::forked() const { return ::getpid() != process_; }

void Engine::check_process() const {
    if (forked()) throw Forked();
}

}  // namespace zinf
