#include "direct_io.hpp"

#include <array>
#include <cerrno>
#include <cstddef>
#include <system_error>

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace zinf {
namespace {

// STATX_DIOALIGN and its two fields came with Linux 6.1. The kernel's ABI is fixed, so its layout is spelled out here and
// the extension builds with older headers too.
constexpr std::uint32_t statx_dioalign = 0x2000;

struct alignas(8) Statx {
    std::uint32_t mask;
    std::array<std::byte, 0x94> not_asked_for;
    std::uint32_t dio_mem_align;
    std::uint32_t dio_offset_align;
    std::array<std::byte, 0x60> reserved;
};
static_assert(offsetof(Statx, dio_mem_align) == 0x98);
static_assert(offsetof(Statx, dio_offset_align) == 0x9c);
static_assert(sizeof(Statx) == 0x100);

}  // namespace

DirectIoAlignment direct_io_alignment(const std::filesystem::path& path) {
    constexpr int follow_links = 0;
    Statx reply{};
    if (::syscall(SYS_statx, AT_FDCWD, path.c_str(), follow_links, statx_dioalign, &reply) != 0) {
        throw std::filesystem::filesystem_error("statx", path, std::error_code(errno, std::system_category()));
    }
    if ((reply.mask & statx_dioalign) == 0) return {.memory = 0, .offset = 0};
    return {.memory = reply.dio_mem_align, .offset = reply.dio_offset_align};
}

}  // namespace zinf
