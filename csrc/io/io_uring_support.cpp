#include "io_uring_support.hpp"

#include <cerrno>
#include <string_view>
#include <system_error>

#include <linux/io_uring.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "file_descriptor.hpp"

namespace zinf {
namespace {

std::string_view advice(int error) {
    switch (error) {
        case EPERM:
            return "; forbidden by a seccomp profile (containers have one by default: allow io_uring_setup, "
                   "io_uring_enter and io_uring_register in it) or by the sysctl kernel.io_uring_disabled (set it to 0)";
        case ENOSYS:
            return "; this kernel has none: io_uring came with Linux 5.1 and can be left out of a kernel's build";
        case ENOMEM:
            return "; the ring's memory may not be locked: raise the limit (ulimit -l)";
        default:
            return "";
    }
}

}  // namespace

std::string io_uring_refusal(int error) {
    return "io_uring_setup: " + std::system_category().message(error) + std::string(advice(error));
}

IoUringSupport io_uring_support() {
    constexpr unsigned entries = 1;
    io_uring_params params{};
    const FileDescriptor ring(static_cast<int>(::syscall(SYS_io_uring_setup, entries, &params)));
    if (ring.is_open()) return {.error = 0, .reason = ""};
    const int error = errno;
    return {.error = error, .reason = io_uring_refusal(error)};
}

}  // namespace zinf
