// One transfer that was submitted: cut into chunks, put together again from their results.
//
// Ownership: shared by whoever waits for it, by the queue and by its chunks under way.
// Threads: plain state without locks of its own; RequestQueue guards it with its mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "chunk.hpp"
#include "transfer.hpp"

namespace zinf {

struct Request {
    Request(std::uint64_t number, const Transfer& transfer, std::size_t chunk_bytes);

    bool all_cut() const { return cut == chunks; }
    bool done() const { return finished == chunks; }

    // The next piece to move. Not after all_cut().
    Chunk cut_next(const std::shared_ptr<Request>& self);

    // After an error: gives up the chunks that weren't cut.
    void give_up();

    // Records a chunk's result.
    void take(const Chunk& chunk);

    const std::uint64_t number;
    const Transfer transfer;
    const std::size_t chunk_bytes;
    std::size_t chunks;        // to be finished before this is done
    std::size_t cut = 0;
    std::size_t finished = 0;
    Outcome outcome;           // whole once done()

private:
    std::vector<std::uint32_t> checksums_;  // by chunk, if asked for
};

}  // namespace zinf
