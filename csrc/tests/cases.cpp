#include "cases.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <random>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "check.hpp"
#include "checksum/crc32c.hpp"
#include "scratch.hpp"

namespace zinf::tests {
namespace {

constexpr Settings small{.kind = Kind::automatic, .depth = 4, .chunk_bytes = 4096, .bandwidth = 0};

void random_pieces_in_random_order(const MakeEngine& make) {
    const auto engine = make(small);
    constexpr std::size_t size = 1 << 19;
    const Scratch file(size);
    Bytes expected = random_bytes(size, 7);
    std::mt19937 dice(3);
    std::vector<std::size_t> cuts{0, size};
    for (int i = 0; i < 60; ++i) cuts.push_back(dice() % size);
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) order.push_back(i);

    Bytes found(size);
    for (const bool write : {true, false}) {
        std::shuffle(order.begin(), order.end(), dice);
        std::vector<Pending> all;
        for (const std::size_t i : order) {
            all.push_back(engine->submit({.write = write,
                                          .fd = file.fd(),
                                          .offset = cuts[i],
                                          .address = (write ? expected : found).data() + cuts[i],
                                          .bytes = cuts[i + 1] - cuts[i],
                                          .checksum = true}));
        }
        for (std::size_t k = 0; k < order.size(); ++k) {
            const std::size_t i = order[k];
            const Outcome outcome = result(all[k]);
            check_equal(outcome.error, 0, "the transfer succeeds");
            check_equal(outcome.moved, cuts[i + 1] - cuts[i], "all bytes are moved");
            check_equal(outcome.checksum, crc32c({expected.data() + cuts[i], cuts[i + 1] - cuts[i]}), "the sum is of its bytes");
        }
    }
    check(found == expected && file.content(0, size) == expected, "what is read is what was written");
    check_equal(engine->counters().in_flight, 0U, "nothing is in flight");
    check_equal(engine->counters().bytes_read, size, "bytes read are counted once");
    check_equal(engine->take_finished().size(), 2 * order.size(), "each request is reported as finished, once");
}

void a_read_past_the_end_says_where(const MakeEngine& make) {
    const auto engine = make(small);
    const Scratch file(10000);
    Bytes into(40000);
    const Outcome outcome = result(engine->submit({.fd = file.fd(), .offset = 100, .address = into.data(), .bytes = into.size()}));
    check_equal(outcome.error, EIO, "an early end is an error");
    check(outcome.ended, "and said to be one");
    check_equal(outcome.failed_at, 10000U, "it failed where the file ends");
    check_equal(outcome.moved, 9900U, "what was there was read");
}

void a_bad_descriptor_is_an_error(const MakeEngine& make) {
    const auto engine = make(small);
    Bytes memory(100000);
    for (const bool write : {true, false}) {
        const Outcome outcome = result(
            engine->submit({.write = write, .fd = -1, .offset = 5, .address = memory.data(), .bytes = memory.size(), .checksum = true}));
        check_equal(outcome.error, EBADF, "the kernel's error arrives");
        check_equal(outcome.failed_at, 5U, "at the request's first byte");
        check_equal(outcome.moved, 0U, "and nothing moved");
    }
}

void no_bytes_are_done_at_once(const MakeEngine& make) {
    const auto engine = make(small);
    const Pending pending = engine->submit({.fd = -1, .checksum = true});
    check(pending.done(), "nothing to do");
    check_equal(result(pending).checksum, 0U, "the sum of no bytes");
}

void closing_waits_for_what_was_dropped(const MakeEngine& make) {
    const auto engine = make(small);
    const Scratch file;
    Bytes source = random_bytes(300001, 5);
    for (std::size_t i = 0; i < 3; ++i) {
        engine->submit({.write = true, .fd = file.fd(), .offset = i * source.size(), .address = source.data(), .bytes = source.size()});
    }
    engine->close();
    for (std::size_t i = 0; i < 3; ++i) check(file.content(i * source.size(), source.size()) == source, "all is written");
    engine->close();
    try {
        engine->submit({.fd = file.fd(), .address = source.data(), .bytes = 1});
        check(false, "a closed engine takes nothing");
    } catch (const Closed&) {
    }
}

void threads_share_an_engine(const MakeEngine& make) {
    const auto engine = make(small);
    constexpr std::size_t each = 50000;
    const Scratch file(8 * each);
    std::vector<std::jthread> threads;
    for (unsigned i = 0; i < 8; ++i) {
        threads.emplace_back([&, i] {
            Bytes source = random_bytes(each, i);
            Bytes into(each);
            for (int round = 0; round < 5; ++round) {
                check_equal(result(engine->submit({.write = true, .fd = file.fd(), .offset = i * each, .address = source.data(), .bytes = each})).error, 0, "written");
                const Pending read = engine->submit({.fd = file.fd(), .offset = i * each, .address = into.data(), .bytes = each});
                std::jthread other([&] { wait(read); });
                wait(read);
                check(into == source, "each thread finds its own bytes");
            }
        });
    }
}

void a_child_is_told_and_harms_nothing(const MakeEngine& make) {
    auto engine = make(small);
    const Scratch file;
    Bytes source = random_bytes(2000000, 9);
    const Pending pending = engine->submit({.write = true, .fd = file.fd(), .address = source.data(), .bytes = source.size()});
    const pid_t child = ::fork();
    if (child == 0) {
        int refusals = 0;
        const auto refused = [&](auto&& use) {
            try {
                use();
            } catch (const Forked&) {
                ++refusals;
            }
        };
        refused([&] { engine->submit({.fd = file.fd(), .address = source.data(), .bytes = 1}); });
        refused([&] { wait(pending); });
        refused([&] { engine->close(); });
        engine.reset();
        ::_exit(refusals == 3 ? 0 : 1);
    }
    int status = -1;
    check(::waitpid(child, &status, 0) == child && status == 0, "the child is refused, three times");
    check_equal(result(pending).error, 0, "the parent's transfer goes on");
    check(file.content(0, source.size()) == source, "untouched");
}

void bandwidth_is_kept(const MakeEngine& make) {
    Settings slow = small;
    slow.bandwidth = 4e6;
    const auto engine = make(slow);
    const Scratch file;
    Bytes source = random_bytes(1000000, 2);
    const auto begin = Clock::now();
    check_equal(result(engine->submit({.write = true, .fd = file.fd(), .address = source.data(), .bytes = source.size()})).error, 0, "written");
    const std::chrono::duration<double> taken = Clock::now() - begin;
    check(taken.count() > 0.22, "a megabyte at four a second takes a quarter of one");
    check(taken.count() < 5, "and not for ever");
}

constexpr std::array table{
    Case{"random pieces in random order", random_pieces_in_random_order},
    Case{"a read past the end says where", a_read_past_the_end_says_where},
    Case{"a bad descriptor is an error", a_bad_descriptor_is_an_error},
    Case{"no bytes are done at once", no_bytes_are_done_at_once},
    Case{"closing waits for what was dropped", closing_waits_for_what_was_dropped},
    Case{"threads share an engine", threads_share_an_engine},
    Case{"a child is told and harms nothing", a_child_is_told_and_harms_nothing},
    Case{"bandwidth is kept", bandwidth_is_kept},
};

}  // namespace

std::span<const Case> cases() { return table; }

}  // namespace zinf::tests
