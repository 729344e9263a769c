// The owner of a kernel file descriptor.
//
// Ownership: an instance owns its descriptor and closes it when it dies; nobody else closes it.
// Threads: any thread may own one; the descriptor may be used from any thread while its owner lives.
#pragma once

#include <unistd.h>

namespace zinf {

class FileDescriptor {
public:
    explicit FileDescriptor(int fd) noexcept : fd_(fd) {}

    ~FileDescriptor() {
        if (is_open()) ::close(fd_);
    }

    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;

    bool is_open() const noexcept { return fd_ >= 0; }
    int get() const noexcept { return fd_; }

private:
    int fd_;
};

}  // namespace zinf
