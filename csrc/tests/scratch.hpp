// A nameless file and random bytes, for the tests to transfer.
//
// Ownership: a Scratch owns its descriptor.
// Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <random>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "check.hpp"
#include "io/file_descriptor.hpp"

namespace zinf::tests {

using Bytes = std::vector<std::byte>;

class Scratch {
public:
    explicit Scratch(std::size_t bytes = 0) : fd_(::open(std::filesystem::temp_directory_path().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)) {
        check(fd_.is_open() && ::ftruncate(fd_.get(), static_cast<off_t>(bytes)) == 0, "a file without a name, where temporary files are");
    }

    int fd() const { return fd_.get(); }

    Bytes content(std::uint64_t offset, std::size_t bytes) const {
        Bytes found(bytes);
        check(::pread(fd(), found.data(), bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes), "the file is whole");
        return found;
    }

private:
    FileDescriptor fd_;
};

inline Bytes random_bytes(std::size_t bytes, unsigned seed) {
    std::mt19937 dice(seed);
    Bytes all(bytes);
    for (auto& byte : all) byte = static_cast<std::byte>(dice());
    return all;
}

}  // namespace zinf::tests
