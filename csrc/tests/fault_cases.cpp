#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>
#include <vector>

#include "cases.hpp"
#include "check.hpp"
#include "checksum/crc32c.hpp"
#include "faulty_kernel.hpp"
#include "scratch.hpp"

namespace zinf::tests {
namespace {

Engine with(Kind kind, const Faults& faults) {
    return Engine({.kind = kind, .depth = 4, .chunk_bytes = 4096, .bandwidth = 0}, std::make_shared<FaultyKernel>(faults));
}

void an_error_leaves_the_next_request_alone(Kind kind, bool write, int error) {
    Engine engine = with(kind, {.fails_at = 20000, .error = error});
    const Scratch file(100000);
    Bytes memory(100000);
    const Outcome failed = result(engine.submit({.write = write, .fd = file.fd(), .address = memory.data(), .bytes = 100000, .checksum = true}));
    check_equal(failed.error, error, "the error arrives");
    check_equal(failed.failed_at, 16384U, "with the chunk it struck");
    check(!failed.ended && failed.moved < 100000, "and what was moved");
    check_equal(result(engine.submit({.write = write, .fd = file.fd(), .address = memory.data(), .bytes = 16384})).error, 0, "others succeed");
}

void direct_transfers_resume_aligned(Kind kind) {
    Engine engine = with(kind, {.percent_short = 20, .alignment = 512});
    const Scratch file;
    Bytes source = random_bytes(1 << 18, 4);
    Bytes into(source.size());
    for (const bool write : {true, false}) {
        // A transfer that doesn't get past a block at the fourth attempt fails: likely now and then, and never silent.
        Outcome outcome{.error = EIO};
        for (int attempt = 0; outcome.error == EIO && attempt < 50; ++attempt) {
            outcome = result(engine.submit({.write = write, .fd = file.fd(), .address = (write ? source : into).data(), .bytes = source.size(), .alignment = 512, .checksum = true}));
        }
        check_equal(outcome.error, 0, "no offset is misaligned");
        check_equal(outcome.checksum, crc32c(source), "nor a byte lost");
        check_equal(outcome.moved, source.size(), "or counted twice");
    }
    check(into == source, "what is read is what was written");
}

void no_room_for_ever_is_an_error(Kind kind) {
    Engine engine = with(kind, {.never_room = true});
    const Scratch file(4096);
    Bytes memory(4096);
    check_equal(result(engine.submit({.fd = file.fd(), .address = memory.data(), .bytes = 4096})).error, EAGAIN, "not a hang");
}

// Threads go on: what was under way arrives once, what wasn't is moved by them, and so is all that comes later.
void a_ring_that_breaks_loses_nothing() {
    for (const unsigned enters : {1U, 2U, 3U, 10U, 40U}) {
        for (const unsigned percent_short : {0U, 30U}) {
            Engine engine = with(Kind::io_uring, {.percent_short = percent_short, .enters = enters});
            const Scratch file(1000000);
            Bytes source = random_bytes(1000000, enters);
            Bytes into(source.size());
            for (int round = 0; round < 3; ++round) {
                for (const bool write : {true, false}) {
                    Bytes& memory = write ? source : into;
                    std::vector<Pending> all;
                    for (std::size_t begin = 0; begin < source.size(); begin += 250000) {
                        all.push_back(engine.submit({.write = write, .fd = file.fd(), .offset = begin, .address = memory.data() + begin, .bytes = 250000, .checksum = true}));
                    }
                    for (std::size_t i = 0; i < all.size(); ++i) {
                        const Outcome outcome = result(all[i]);
                        check_equal(outcome.error, 0, "no error");
                        check_equal(outcome.moved, 250000U, "all bytes, once");
                        check_equal(outcome.checksum, crc32c({source.data() + i * 250000, 250000}), "the sum is of its bytes");
                    }
                }
                check(into == source && file.content(0, source.size()) == source, "what is read is what was written");
                std::fill(into.begin(), into.end(), std::byte{0});
            }
            check_equal(engine.broken(), EPERM, "the engine knows why");
            check_equal(engine.counters().in_flight, 0U, "nothing is left behind");
            check_equal(engine.counters().bytes_written, 3 * source.size(), "nothing is counted twice");
            engine.close();
        }
    }
}

void refusals_fall_back() {
    for (const Faults& faults : {Faults{.setup_error = EPERM}, Faults{.setup_error = ENOSYS}, Faults{.old = true}, Faults{.enters = 0}}) {
        const Engine engine = with(Kind::automatic, faults);
        check(engine.kind() == Kind::threads && !engine.reason().empty(), "threads, and why");
        try {
            with(Kind::io_uring, faults);
            check(false, "by name it is an error");
        } catch (const std::system_error& refused) {
            check(engine.reason() == refused.what(), "with the same reason");
        }
    }
}

}  // namespace

void run_fault_cases(Kind kind) {
    for (const bool write : {true, false}) {
        for (const int error : {EIO, ENOSPC, EDQUOT, EINVAL}) an_error_leaves_the_next_request_alone(kind, write, error);
    }
    direct_transfers_resume_aligned(kind);
    no_room_for_ever_is_an_error(kind);
    if (kind != Kind::io_uring) return;
    a_ring_that_breaks_loses_nothing();
    refusals_fall_back();
}

void run_crc32c_cases() {
    const char digits[] = "123456789";
    check_equal(crc32c(std::as_bytes(std::span(digits, 9))), 0xe3069283U, "the published check value");
    const Bytes zeros(32);
    check_equal(crc32c(zeros), 0x8a9136aaU, "RFC 3720's 32 zero bytes");
    const Bytes all = random_bytes(40000, 1);
    for (const std::size_t size : {0, 1, 7, 8, 9, 511, 512, 513, 767, 768, 4095, 12287, 12288, 12289, 24577, 39999}) {
        const std::span bytes = std::span(all).subspan(1, size);
        for (const Crc32cWay way : crc32c_ways()) {
            check_equal(~way(bytes.data(), size, ~0U), crc32c(bytes), "each way");
            check_equal(~way(bytes.data(), size, 0x12345678), crc32c(bytes, ~0x12345678U), "from any remainder");
        }
        const auto [head, tail] = std::pair(bytes.first(size / 3), bytes.subspan(size / 3));
        check_equal(crc32c(tail, crc32c(head)), crc32c(bytes), "continued");
        check_equal(crc32c_combine(crc32c(head), crc32c(tail), tail.size()), crc32c(bytes), "combined");
    }
}

}  // namespace zinf::tests
