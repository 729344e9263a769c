// CRC32C (Castagnoli), the checksum of iSCSI, ext4 and NVMe: of bytes, and of two runs of bytes put together.
//
// Ownership: nothing is kept.
// Threads: any thread may call; the bytes must not change meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace zinf {

// Extends a checksum by `bytes`: the result is that of the earlier bytes and these. 0 is the checksum of no bytes.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t value = 0);

// A way to compute it: from the remainder so far to the one after the bytes, both being checksums with all bits flipped.
using Crc32cWay = std::uint32_t (*)(const std::byte* at, std::size_t bytes, std::uint32_t remainder);

// The ways that this processor has, the one in use first; the last needs no instruction of its own. For tests.
const std::vector<Crc32cWay>& crc32c_ways();

// The checksum of two runs of bytes put together, from the checksum of each and the second one's length.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes);

}  // namespace zinf
