// A transfer to perform, and its result: plain values.
//
// Ownership: a Transfer refers to memory and to a descriptor of the caller's, who keeps both until it is done.
// Threads: values; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zinf {

struct Transfer {
    bool write = false;
    int fd = -1;
    std::uint64_t offset = 0;      // in the file, in bytes
    std::byte* address = nullptr;  // read into, or written from
    std::size_t bytes = 0;
    std::size_t alignment = 1;     // what a resumed transfer's offset must be a multiple of: above 1 with O_DIRECT
    bool checksum = false;
};

struct Outcome {
    int error = 0;                // an errno; 0 if every byte was moved
    bool ended = false;           // the error is that the file ended early
    std::uint64_t failed_at = 0;  // offset in the file, if there is an error
    std::size_t moved = 0;        // bytes, over all chunks
    std::uint32_t checksum = 0;   // CRC32C of the bytes moved, if asked for and without error
    double began = 0.0;           // seconds of the steady clock: its first chunk was taken
    double over = 0.0;            // the same: its last one was finished
};

}  // namespace zinf
