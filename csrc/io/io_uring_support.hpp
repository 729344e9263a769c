// Whether this process may use io_uring. A refusal is normal (containers forbid it by default) and is a value here, not
// an error: the I/O engine then runs on threads.
//
// Ownership: the result owns its text; the ring made to find out is closed before the function returns.
// Threads: any thread may call. The answer is the calling thread's, because seccomp filters belong to threads.
#pragma once

#include <string>

namespace zinf {

struct IoUringSupport {
    int error;           // the errno of io_uring_setup, 0 where it succeeded
    std::string reason;  // what the error means and what to do about it, empty where there is none

    bool available() const noexcept { return error == 0; }
};

// Explains a refusal of io_uring_setup with this errno, and says what to do about it.
std::string io_uring_refusal(int error);

// Sets up the smallest ring and closes it again.
IoUringSupport io_uring_support();

}  // namespace zinf
