// CRC32C (Castagnoli), the checksum of iSCSI, ext4 and NVMe: of bytes, and of two runs of bytes put together.
//
// Ownership: nothing is kept.
// Threads: any thread may call; the bytes must not change meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zinf {

// The checksum of what `value` is the checksum of, followed by `bytes`. 0 is the checksum of no bytes.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t value = 0);

// The same without the processor's instruction for it: what runs where there is none, and what tests compare with.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t value = 0);

// The checksum of two runs of bytes put together, from the checksum of each and the second one's length.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes);

}  // namespace zinf
