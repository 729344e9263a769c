#include "system_calls.hpp"

#include <cerrno>

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace zinf {
namespace {

template <typename Result>
Result or_errno(Result result) {
    return result < 0 ? -errno : result;
}

}  // namespace

ssize_t SystemCalls::read(int fd, std::byte* into, std::size_t bytes, std::uint64_t offset) {
    const iovec piece{.iov_base = into, .iov_len = bytes};
    return or_errno(::preadv(fd, &piece, 1, static_cast<off_t>(offset)));
}

ssize_t SystemCalls::write(int fd, const std::byte* from, std::size_t bytes, std::uint64_t offset) {
    const iovec piece{.iov_base = const_cast<std::byte*>(from), .iov_len = bytes};
    return or_errno(::pwritev(fd, &piece, 1, static_cast<off_t>(offset)));
}

int SystemCalls::ring_setup(unsigned entries, io_uring_params& params) {
    return static_cast<int>(or_errno(::syscall(SYS_io_uring_setup, entries, &params)));
}

int SystemCalls::ring_enter(int ring, unsigned submit, unsigned wait_for) {
    const unsigned flags = wait_for > 0 ? IORING_ENTER_GETEVENTS : 0;
    return static_cast<int>(or_errno(::syscall(SYS_io_uring_enter, ring, submit, wait_for, flags, nullptr, 0)));
}

void* SystemCalls::ring_map(int ring, std::size_t bytes, std::uint64_t what) {
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, static_cast<off_t>(what));
    if (at == MAP_FAILED) return nullptr;
    ::madvise(at, bytes, MADV_DONTFORK);  // a child that touches a ring would corrupt its parent's
    return at;
}

void SystemCalls::ring_unmap(void* at, std::size_t bytes) { ::munmap(at, bytes); }

}  // namespace zinf
