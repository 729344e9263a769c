// The alignment of buffers and offsets that a file requires for direct I/O (O_DIRECT).
//
// Ownership: plain values; nothing stays open.
// Threads: any thread may call. The call may block on a network filesystem: don't hold the GIL.
#pragma once

#include <cstdint>
#include <filesystem>

namespace zinf {

// In bytes; both are 0 where the filesystem doesn't say, which is no promise that direct I/O fails.
struct DirectIoAlignment {
    std::uint32_t memory;  // of the buffer's address
    std::uint32_t offset;  // of the file offset and of the length
};

// Asks statx. Follows symbolic links. Throws std::filesystem::filesystem_error, with the path, where statx fails.
DirectIoAlignment direct_io_alignment(const std::filesystem::path& path);

}  // namespace zinf
