// The system calls beneath the engine, in one place so that tests can put a faulty kernel there.
//
// Ownership: nothing is kept; a caller owns the descriptors and mappings it gets.
// Threads: any thread may call; a replacement must allow that too.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sys/types.h>

struct io_uring_params;

namespace zinf {

// Each gives what the kernel gives, and -errno where the call failed.
class SystemCalls {
public:
    SystemCalls() = default;
    virtual ~SystemCalls() = default;
    SystemCalls(const SystemCalls&) = delete;
    SystemCalls& operator=(const SystemCalls&) = delete;

    virtual ssize_t read(int fd, std::byte* into, std::size_t bytes, std::uint64_t offset);
    virtual ssize_t write(int fd, const std::byte* from, std::size_t bytes, std::uint64_t offset);

    virtual int ring_setup(unsigned entries, io_uring_params& params);
    virtual int ring_enter(int ring, unsigned submit, unsigned wait_for);
    virtual void* ring_map(int ring, std::size_t bytes, std::uint64_t what);  // nullptr where it failed
    virtual void ring_unmap(void* at, std::size_t bytes);
};

}  // namespace zinf
