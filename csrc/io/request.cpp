#include "request.hpp"

#include <algorithm>

#include "checksum/crc32c.hpp"

namespace zinf {

Request::Request(std::uint64_t number, const Transfer& transfer, std::size_t chunk_bytes)
    : number(number),
      transfer(transfer),
      chunk_bytes(chunk_bytes),
      chunks(transfer.bytes / chunk_bytes + (transfer.bytes % chunk_bytes != 0)) {
    if (transfer.checksum) checksums_.resize(chunks);
}

Chunk Request::cut_next(const std::shared_ptr<Request>& self) {
    const std::size_t begin = cut * chunk_bytes;
    Chunk chunk;
    chunk.request = self;
    chunk.transfer = transfer;
    chunk.transfer.offset += begin;
    chunk.transfer.address += begin;
    chunk.transfer.bytes = std::min(chunk_bytes, transfer.bytes - begin);
    chunk.index = cut++;
    return chunk;
}

void Request::give_up() { chunks = cut; }

void Request::take(const Chunk& chunk) {
    ++finished;
    outcome.moved += chunk.moved;
    if (chunk.error != 0 && (outcome.error == 0 || chunk.offset() < outcome.failed_at)) {  // of several, the first in the file
        outcome.error = chunk.error;
        outcome.ended = chunk.ended;
        outcome.failed_at = chunk.offset();
    }
    if (!transfer.checksum) return;
    checksums_[chunk.index] = chunk.checksum;
    if (!done() || outcome.error != 0) return;
    for (std::size_t index = 0; index < chunks; ++index) {
        const std::size_t bytes = std::min(chunk_bytes, transfer.bytes - index * chunk_bytes);
        outcome.checksum = crc32c_combine(outcome.checksum, checksums_[index], bytes);
    }
}

}  // namespace zinf
