#include "engine.hpp"

#include <system_error>
#include <utility>

#include <unistd.h>

namespace zinf {

Pending::Pending(std::shared_ptr<RequestQueue> requests, std::shared_ptr<Request> request, pid_t process)
    : requests_(std::move(requests)), request_(std::move(request)), process_(process) {}

bool Pending::done() const {
    if (::getpid() != process_) throw Forked();
    return requests_->done(*request_);
}

bool Pending::wait_for(std::chrono::milliseconds patience) const {
    if (::getpid() != process_) throw Forked();
    return requests_->wait_for(*request_, patience);
}

Outcome Pending::outcome() const {
    if (::getpid() != process_) throw Forked();
    return requests_->outcome(*request_);
}

Engine::Engine(const Settings& settings, std::shared_ptr<SystemCalls> calls)
    : process_(::getpid()),
      kind_(settings.kind),
      requests_(std::make_shared<RequestQueue>(settings.chunk_bytes, settings.bandwidth)) {
    if (kind_ != Kind::threads) {
        try {
            backend_ = make_io_uring_backend(requests_, calls, settings.depth);
            kind_ = Kind::io_uring;
        } catch (const std::system_error& refusal) {
            if (kind_ == Kind::io_uring) throw;
            reason_ = refusal.what();
        }
    }
    if (!backend_) {
        backend_ = make_thread_backend(requests_, std::move(calls), settings.depth);
        kind_ = Kind::threads;
    }
}

Engine::~Engine() {
    if (!forked()) {
        close();
        return;
    }
    // The threads are the parent's, locks may be held by them for ever, and the ring is shared: all of it is left as it is.
    static_cast<void>(backend_.release());
    static_cast<void>(new std::shared_ptr<RequestQueue>(std::move(requests_)));
}

Pending Engine::submit(const Transfer& transfer) {
    check_process();
    const std::lock_guard locked(mutex_);
    if (!backend_) throw Closed();
    if (!started_) backend_->start();
    started_ = true;
    auto request = requests_->add(transfer);
    if (!request) throw Closed();
    backend_->notify();
    return {requests_, std::move(request), process_};
}

std::vector<std::uint64_t> Engine::take_finished() {
    check_process();
    return requests_->take_finished();
}

Counters Engine::counters() const {
    check_process();
    return requests_->counters();
}

void Engine::close() {
    check_process();
    requests_->stop_accepting();
    requests_->wait_for_all();
    const std::lock_guard locked(mutex_);
    if (!backend_) return;
    requests_->end();
    backend_->notify();
    backend_.reset();
}

int Engine::broken() const {
    check_process();
    const std::lock_guard locked(mutex_);
    return backend_ ? backend_->broken() : 0;
}

bool Engine::forked() const { return ::getpid() != process_; }

void Engine::check_process() const {
    if (forked()) throw Forked();
}

}  // namespace zinf
