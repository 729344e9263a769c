#include "chunk.hpp"

#include <algorithm>
#include <cerrno>

#include "checksum/crc32c.hpp"

namespace zinf {
namespace {

constexpr unsigned most_refusals = 1000;
constexpr unsigned most_stalls = 3;

Next fail(Chunk& chunk, int error) {
    chunk.error = error;
    return Next::finished;
}

}  // namespace

Next advance(Chunk& chunk, ssize_t result) {
    if (result == -EINTR) return Next::again;
    if (result == -EAGAIN) return ++chunk.refusals > most_refusals ? fail(chunk, EAGAIN) : Next::later;
    if (result < 0) return fail(chunk, static_cast<int>(-result));
    chunk.refusals = 0;

    const auto bytes = static_cast<std::size_t>(result);
    if (bytes > chunk.left()) return fail(chunk, EIO);  // more than asked for: whatever it was, it wasn't this transfer
    chunk.moved = std::max(chunk.moved, chunk.done + bytes);
    if (bytes == chunk.left()) {
        chunk.done = chunk.transfer.bytes;
        return Next::finished;
    }
    // A direct transfer goes on from a multiple of the alignment, so that its last bytes may be moved twice.
    const std::size_t useful = bytes - bytes % chunk.transfer.alignment;
    if (useful == 0 && (bytes == 0 || ++chunk.stalls > most_stalls)) {
        chunk.ended = !chunk.transfer.write;
        return fail(chunk, EIO);
    }
    if (useful > 0) chunk.stalls = 0;
    chunk.done += useful;
    return Next::again;
}

void update_checksum(Chunk& chunk) {
    if (chunk.transfer.checksum) chunk.checksum = crc32c({chunk.transfer.address, chunk.transfer.bytes});
}

}  // namespace zinf
