// An io_uring by raw system calls: a queue of entries for the kernel, a queue of its completions.
//
// Ownership: an instance owns its descriptor and mappings.
// Threads: one thread at a time; the kernel is the other side of both queues.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include <linux/io_uring.h>

#include "file_descriptor.hpp"
#include "system_calls.hpp"

namespace zinf {

class IoUring {
public:
    struct Completion {
        std::uint64_t user_data;
        std::int32_t result;
    };

    // Room for `entries` at a time. Throws std::system_error, saying what to do, where the kernel refuses or is too old.
    IoUring(std::shared_ptr<SystemCalls> calls, unsigned entries);

    // Puts an entry into the queue, to be submitted by the next enter(). The caller never has more than `entries` there and
    // under way together, which is also why no completion can overflow.
    void push(const io_uring_sqe& entry);

    // Submits what was pushed and waits for so many completions. 0 or -errno.
    int enter(unsigned wait_for);

    std::optional<Completion> pop();

    // Takes the last entry back that was pushed but not submitted; gives its user_data.
    std::optional<std::uint64_t> withdraw();

private:
    struct Unmap {
        SystemCalls* calls;
        std::size_t bytes;
        void operator()(void* at) const { calls->ring_unmap(at, bytes); }
    };
    using Mapping = std::unique_ptr<void, Unmap>;

    IoUring(std::shared_ptr<SystemCalls> calls, unsigned entries, io_uring_params params);
    Mapping map(std::size_t bytes, std::uint64_t what);
    std::uint32_t& number(const Mapping& at, std::uint32_t offset) const;

    std::shared_ptr<SystemCalls> calls_;
    io_uring_params params_;
    FileDescriptor fd_;
    Mapping queues_;
    Mapping entries_;
};

}  // namespace zinf
