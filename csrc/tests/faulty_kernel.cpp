#include "faulty_kernel.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.hpp"

namespace zinf::tests {

bool FaultyKernel::happens(unsigned percent) {
    const std::lock_guard locked(mutex_);
    return dice_() % 100 < percent;
}

ssize_t FaultyKernel::fault(std::size_t& bytes, std::uint64_t offset) {
    if (faults_.never_room || happens(faults_.percent_no_room)) return -EAGAIN;
    if (happens(faults_.percent_interrupted)) return -EINTR;
    if (offset % faults_.alignment != 0) return -EINVAL;
    if (faults_.fails_at && offset <= *faults_.fails_at && *faults_.fails_at < offset + bytes) return -faults_.error;
    if (bytes > 1 && happens(faults_.percent_short)) {
        const std::lock_guard locked(mutex_);
        bytes = 1 + dice_() % (bytes - 1);
    }
    return 0;
}

ssize_t FaultyKernel::read(int fd, std::byte* into, std::size_t bytes, std::uint64_t offset) {
    const ssize_t failed = fault(bytes, offset);
    return failed != 0 ? failed : SystemCalls::read(fd, into, bytes, offset);
}

ssize_t FaultyKernel::write(int fd, const std::byte* from, std::size_t bytes, std::uint64_t offset) {
    const ssize_t failed = fault(bytes, offset);
    return failed != 0 ? failed : SystemCalls::write(fd, from, bytes, offset);
}

int FaultyKernel::ring_setup(unsigned entries, io_uring_params& params) {
    if (faults_.setup_error != 0) return -faults_.setup_error;
    params.sq_entries = std::bit_ceil(entries);
    params.cq_entries = 2 * params.sq_entries;
    params.features = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | (faults_.old ? 0 : IORING_FEAT_RW_CUR_POS);
    params.sq_off.head = 0;
    params.sq_off.tail = 4;
    params.cq_off.head = 8;
    params.cq_off.tail = 12;
    params.sq_off.array = 16;
    params.cq_off.cqes = 16 + 8 * params.sq_entries;
    params_ = params;
    queues_.assign((params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe)) / 8, 0);
    entries_.resize(params.sq_entries);
    return ::open("/dev/null", O_RDWR | O_CLOEXEC);
}

void* FaultyKernel::ring_map(int, std::size_t, std::uint64_t what) {
    if (what == IORING_OFF_SQES) return entries_.data();
    return queues_.data();
}

std::uint32_t& FaultyKernel::number(std::uint32_t offset) {
    return *reinterpret_cast<std::uint32_t*>(reinterpret_cast<std::byte*>(queues_.data()) + offset);
}

int FaultyKernel::ring_enter(int, unsigned submit, unsigned wait_for) {
    if (entered_++ >= faults_.enters) {
        complete(true);
        return -EPERM;
    }
    if (happens(faults_.percent_interrupted)) return -EINTR;
    if (happens(faults_.percent_no_room)) return -EBUSY;
    consume(submit);
    complete(false);
    while (number(params_.cq_off.tail) - number(params_.cq_off.head) < wait_for) {
        rest();
        complete(false);
    }
    return static_cast<int>(submit);
}

void FaultyKernel::consume(unsigned entries) {
    std::uint32_t& head = number(params_.sq_off.head);
    const std::uint32_t tail = std::atomic_ref(number(params_.sq_off.tail)).load();
    check(entries <= tail - head && tail - head <= params_.sq_entries, "no more entries than there is room for");
    for (; entries > 0; --entries, std::atomic_ref(head).store(head + 1)) {
        const std::uint32_t place = (&number(params_.sq_off.array))[head & (params_.sq_entries - 1)];
        Waiting waiting{.entry = entries_[place], .until = Clock::now()};
        if (waiting.entry.opcode == IORING_OP_TIMEOUT) {
            const auto* time = reinterpret_cast<const __kernel_timespec*>(waiting.entry.addr);
            waiting.until += std::chrono::seconds(time->tv_sec) + std::chrono::nanoseconds(time->tv_nsec);
        }
        waiting_.push_back(waiting);
    }
}

// Completes some of what waits, in any order; all that can be, if asked for.
void FaultyKernel::complete(bool all) {
    std::shuffle(waiting_.begin(), waiting_.end(), dice_);
    std::erase_if(waiting_, [&](const Waiting& waiting) {
        if (!all && happens(50)) return false;
        const auto result = try_entry(waiting);
        if (!result) return false;
        std::uint32_t& tail = number(params_.cq_off.tail);
        const std::uint32_t head = std::atomic_ref(number(params_.cq_off.head)).load();
        check(tail - head < params_.cq_entries, "completions are taken before there is no room for more");
        auto* all_completions = reinterpret_cast<io_uring_cqe*>(&number(params_.cq_off.cqes));
        io_uring_cqe& completion = all_completions[tail & (params_.cq_entries - 1)];
        completion.user_data = waiting.entry.user_data;
        completion.res = *result;
        std::atomic_ref(tail).store(tail + 1);
        return true;
    });
}

std::optional<std::int32_t> FaultyKernel::try_entry(const Waiting& waiting) {
    const io_uring_sqe& entry = waiting.entry;
    auto* address = reinterpret_cast<std::byte*>(entry.addr);
    if (entry.opcode == IORING_OP_NOP) return 0;
    if (entry.opcode == IORING_OP_TIMEOUT) return Clock::now() >= waiting.until ? std::optional(-ETIME) : std::nullopt;
    if (entry.opcode == IORING_OP_WRITE) return static_cast<std::int32_t>(write(entry.fd, address, entry.len, entry.off));
    check(entry.opcode == IORING_OP_READ, "the simulated ring knows the operation");
    struct stat about {};
    if (::fstat(entry.fd, &about) != 0 || S_ISREG(about.st_mode)) {
        return static_cast<std::int32_t>(read(entry.fd, address, entry.len, entry.off));
    }
    pollfd event{.fd = entry.fd, .events = POLLIN, .revents = 0};  // no file: the engine's eventfd
    if (::poll(&event, 1, 0) != 1) return std::nullopt;
    return static_cast<std::int32_t>(::read(entry.fd, address, entry.len));
}

void FaultyKernel::rest() { std::this_thread::sleep_for(std::chrono::microseconds(100)); }

}  // namespace zinf::tests
