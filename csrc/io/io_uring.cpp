#include "io_uring.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "io_uring_support.hpp"

namespace zinf {
namespace {

// Reading and writing without an iovec came with the same kernel as this feature, one queue mapping for both earlier.
constexpr std::uint32_t needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_RW_CUR_POS;

[[noreturn]] void refuse(int error, const std::string& reason) {
    // system_error appends the error's text, which the reason has already.
    struct Refused : std::system_error {
        Refused(int error, std::string reason)
            : std::system_error(error, std::system_category()), reason_(std::move(reason)) {}
        const char* what() const noexcept override { return reason_.c_str(); }
        std::string reason_;
    };
    throw Refused(error, reason);
}

int set_up(SystemCalls& calls, unsigned entries, io_uring_params& params) {
    const int fd = calls.ring_setup(entries, params);
    if (fd < 0) refuse(-fd, io_uring_refusal(-fd));
    return fd;
}

}  // namespace

IoUring::IoUring(std::shared_ptr<SystemCalls> calls, unsigned entries) : IoUring(std::move(calls), entries, io_uring_params{}) {}

IoUring::IoUring(std::shared_ptr<SystemCalls> calls, unsigned entries, io_uring_params params)
    : calls_(std::move(calls)), params_(params), fd_(set_up(*calls_, entries, params_)) {
    if ((params_.features & needed) != needed) refuse(ENOSYS, "io_uring_setup: this kernel's io_uring is older than Linux 5.6");
    queues_ = map(std::max<std::size_t>(params_.sq_off.array + params_.sq_entries * sizeof(std::uint32_t),
                                        params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe)),
                  IORING_OFF_SQ_RING);
    entries_ = map(params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    for (std::uint32_t place = 0; place < params_.sq_entries; ++place) (&number(queues_, params_.sq_off.array))[place] = place;
}

IoUring::Mapping IoUring::map(std::size_t bytes, std::uint64_t what) {
    Mapping mapping(calls_->ring_map(fd_.get(), bytes, what), Unmap{calls_.get(), bytes});
    if (!mapping) refuse(ENOMEM, "mmap of an io_uring: " + std::system_category().message(ENOMEM));
    return mapping;
}

std::uint32_t& IoUring::number(const Mapping& at, std::uint32_t offset) const {
    return *reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(at.get()) + offset);
}

void IoUring::push(const io_uring_sqe& entry) {
    std::uint32_t& tail = number(queues_, params_.sq_off.tail);
    static_cast<io_uring_sqe*>(entries_.get())[tail & (params_.sq_entries - 1)] = entry;
    std::atomic_ref(tail).store(tail + 1, std::memory_order_release);
}

int IoUring::enter(unsigned wait_for) {
    const std::uint32_t tail = number(queues_, params_.sq_off.tail);
    const std::uint32_t head = std::atomic_ref(number(queues_, params_.sq_off.head)).load(std::memory_order_acquire);
    if (tail == head && wait_for == 0) return 0;
    return std::min(0, calls_->ring_enter(fd_.get(), tail - head, wait_for));
}

std::optional<IoUring::Completion> IoUring::pop() {
    std::uint32_t& head = number(queues_, params_.cq_off.head);
    const std::uint32_t tail = std::atomic_ref(number(queues_, params_.cq_off.tail)).load(std::memory_order_acquire);
    if (head == tail) return std::nullopt;
    const auto* all = reinterpret_cast<const io_uring_cqe*>(&number(queues_, params_.cq_off.cqes));
    const io_uring_cqe& entry = all[head & (params_.cq_entries - 1)];
    const Completion completion{.user_data = entry.user_data, .result = entry.res};
    std::atomic_ref(head).store(head + 1, std::memory_order_release);
    return completion;
}

std::optional<std::uint64_t> IoUring::withdraw() {
    std::uint32_t& tail = number(queues_, params_.sq_off.tail);
    if (tail == std::atomic_ref(number(queues_, params_.sq_off.head)).load(std::memory_order_acquire)) return std::nullopt;
    std::atomic_ref(tail).store(tail - 1, std::memory_order_release);
    return static_cast<const io_uring_sqe*>(entries_.get())[tail & (params_.sq_entries - 1)].user_data;
}

}  // namespace zinf
