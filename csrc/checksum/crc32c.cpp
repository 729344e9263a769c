#include "crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zinf {
namespace {

// Polynomials over GF(2) modulo CRC32C's, the coefficient of x^0 in the highest bit.
constexpr std::uint32_t polynomial = 0x82f63b78;
constexpr std::uint32_t one = 0x80000000;

constexpr std::uint32_t times_x(std::uint32_t a) { return (a & 1) != 0 ? (a >> 1) ^ polynomial : a >> 1; }

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = one; bit != 0; bit >>= 1, b = times_x(b)) {
        if ((a & bit) != 0) product ^= b;
    }
    return product;
}

// x^(8 * bytes): multiplying a checksum by it appends that many zero bytes.
constexpr std::uint32_t shift_by(std::uint64_t bytes) {
    std::uint32_t power = one;
    std::uint32_t square = one >> 8;
    for (; bytes != 0; bytes >>= 1, square = multiply(square, square)) {
        if ((bytes & 1) != 0) power = multiply(power, square);
    }
    return power;
}

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b] is the remainder of byte b followed by k zero bytes.
constexpr Tables make_tables() {
    Tables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t rest = byte;
        for (int bit = 0; bit < 8; ++bit) rest = times_x(rest);
        for (auto& table : tables) {
            table[byte] = rest;
            for (int bit = 0; bit < 8; ++bit) rest = times_x(rest);
        }
    }
    return tables;
}

constexpr Tables tables = make_tables();

std::uint64_t load(const std::byte* at) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

std::uint32_t by_table(const std::byte* at, std::size_t bytes, std::uint32_t rest) {
    for (; bytes >= 8; at += 8, bytes -= 8) {
        const std::uint64_t word = load(at) ^ rest;
        rest = 0;
        for (unsigned k = 0; k < 8; ++k) rest ^= tables[7 - k][(word >> (8 * k)) & 0xff];
    }
    for (; bytes != 0; ++at, --bytes) rest = (rest >> 8) ^ tables[0][(rest ^ std::to_integer<unsigned>(*at)) & 0xff];
    return rest;
}

#if defined(__x86_64__)

// The instruction answers after three cycles but starts every cycle: three runs side by side keep it busy. What comes
// after run k is appended to it by table: shifts[k] multiplies by x^(8 * run) byte by byte.
constexpr std::size_t run = 4096;

constexpr std::array<std::array<std::uint32_t, 256>, 4> make_shift() {
    std::array<std::array<std::uint32_t, 256>, 4> shift{};
    const std::uint32_t power = shift_by(run);
    for (std::uint32_t place = 0; place < 4; ++place) {
        for (std::uint32_t byte = 0; byte < 256; ++byte) shift[place][byte] = multiply(byte << (8 * place), power);
    }
    return shift;
}

constexpr auto shift = make_shift();

std::uint32_t append_run(std::uint32_t rest, std::uint32_t next) {
    return shift[0][rest & 0xff] ^ shift[1][(rest >> 8) & 0xff] ^ shift[2][(rest >> 16) & 0xff] ^ shift[3][rest >> 24] ^
           next;
}

__attribute__((target("sse4.2"))) std::uint32_t by_instruction(const std::byte* at, std::size_t bytes,
                                                               std::uint32_t rest) {
    for (; bytes >= 3 * run; at += 3 * run, bytes -= 3 * run) {
        std::uint64_t first = rest;
        std::uint64_t second = 0;
        std::uint64_t third = 0;
        for (std::size_t i = 0; i < run; i += 8) {
            first = _mm_crc32_u64(first, load(at + i));
            second = _mm_crc32_u64(second, load(at + run + i));
            third = _mm_crc32_u64(third, load(at + 2 * run + i));
        }
        rest = append_run(append_run(static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(second)),
                          static_cast<std::uint32_t>(third));
    }
    std::uint64_t wide = rest;
    for (; bytes >= 8; at += 8, bytes -= 8) wide = _mm_crc32_u64(wide, load(at));
    rest = static_cast<std::uint32_t>(wide);
    for (; bytes != 0; ++at, --bytes) rest = _mm_crc32_u8(rest, std::to_integer<unsigned char>(*at));
    return rest;
}

// Where the processor multiplies polynomials in wide registers, summing is as fast as reading memory. A register holds 64
// bytes of message, 16 to a lane; four of them are moved on by 256 bytes at a time: a lane's halves times the powers of x
// that they are moved by, less the one that a product of reflected polynomials is off by.
constexpr std::size_t stride = 256;
constexpr std::size_t ahead = 1024;  // what is asked of memory meanwhile

constexpr long long moved_by(unsigned bits) {
    std::uint32_t power = one;
    for (unsigned bit = 1; bit < bits; ++bit) power = times_x(power);
    return static_cast<long long>(std::uint64_t{power} << 32);
}

__attribute__((target("avx512f,vpclmulqdq,sse4.2"))) std::uint32_t by_folding(const std::byte* at, std::size_t bytes,
                                                                             std::uint32_t rest) {
    if (bytes < 2 * stride) return by_instruction(at, bytes, rest);
    constexpr long long first = moved_by(8 * stride + 64);
    constexpr long long second = moved_by(8 * stride);
    const __m512i powers = _mm512_set_epi64(second, first, second, first, second, first, second, first);
    __m512i sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = _mm512_loadu_si512(at + 64 * i);
    sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(rest))));
    for (at += stride, bytes -= stride; bytes >= stride; at += stride, bytes -= stride) {
        for (int i = 0; i < 4; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(at) + ahead + 64 * i, _MM_HINT_T0);
            const __m512i moved = _mm512_xor_si512(_mm512_clmulepi64_epi128(sums[i], powers, 0x00),
                                                   _mm512_clmulepi64_epi128(sums[i], powers, 0x11));
            sums[i] = _mm512_xor_si512(moved, _mm512_loadu_si512(at + 64 * i));
        }
    }
    std::array<std::byte, stride> left;  // a message of the same remainder as all so far
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(left.data() + 64 * i, sums[i]);
    return by_instruction(at, bytes, by_instruction(left.data(), stride, 0));
}

#endif

}  // namespace

const std::vector<Crc32cWay>& crc32c_ways() {
    static const std::vector<Crc32cWay> ways = [] {
        std::vector<Crc32cWay> found;
#if defined(__x86_64__)
        const bool has_instruction = __builtin_cpu_supports("sse4.2");
        const bool folds = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
        if (has_instruction && folds) found.push_back(by_folding);
        if (has_instruction) found.push_back(by_instruction);
#endif
        found.push_back(by_table);
        return found;
    }();
    return ways;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t value) {
    return ~crc32c_ways().front()(bytes.data(), bytes.size(), ~value);
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) {
    return multiply(first, shift_by(second_bytes)) ^ second;
}

}  // namespace zinf
