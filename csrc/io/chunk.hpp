// A piece of a request, as large as one system call moves, and what each result of that call means for it.
//
// Ownership: a chunk keeps its request alive; the memory is the caller's of that request.
// Threads: one I/O thread has a chunk at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include <sys/types.h>

#include "transfer.hpp"

namespace zinf {

struct Request;

struct Chunk {
    std::shared_ptr<Request> request;
    Transfer transfer;        // of this piece alone
    std::size_t index = 0;    // among the pieces of its request
    std::size_t done = 0;     // bytes that need no second attempt
    std::size_t moved = 0;    // bytes the kernel moved; above `done` where the last ones must be moved again
    unsigned refusals = 0;    // EAGAIN in a row
    unsigned stalls = 0;      // short results in a row that helped nothing
    std::uint32_t checksum = 0;
    int error = 0;
    bool ended = false;

    std::byte* address() const { return transfer.address + done; }
    std::uint64_t offset() const { return transfer.offset + done; }
    std::size_t left() const { return transfer.bytes - done; }
};

enum class Next {
    finished,  // all moved, or `error` is set
    again,     // go on from `done`
    later,     // the same, after a pause: the kernel has no room now
};

// Records the result of a system call for the rest of `chunk`: a number of bytes, or -errno.
Next advance(Chunk& chunk, ssize_t result);

// Sums the chunk's bytes, if its request wants that: before or during a write, after a read.
void update_checksum(Chunk& chunk);

}  // namespace zinf
