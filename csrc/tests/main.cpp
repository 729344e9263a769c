// Runs every case against every engine, on the kernel that is there and on faulty ones. Exits with 0 if all hold.
#include <array>
#include <cstdio>
#include <memory>

#include "cases.hpp"
#include "faulty_kernel.hpp"
#include "io/io_uring_support.hpp"

namespace {

using namespace zinf;
using namespace zinf::tests;

struct Kernel {
    const char* name;
    std::shared_ptr<SystemCalls> (*make)();
};

constexpr Faults nuisances{.percent_short = 30, .percent_interrupted = 15, .percent_no_room = 3};

constexpr std::array kernels{
    Kernel{"this kernel", []() -> std::shared_ptr<SystemCalls> { return std::make_shared<SystemCalls>(); }},
    Kernel{"late and reordered", []() -> std::shared_ptr<SystemCalls> { return std::make_shared<FaultyKernel>(Faults{}); }},
    Kernel{"short, interrupted and full", []() -> std::shared_ptr<SystemCalls> { return std::make_shared<FaultyKernel>(nuisances); }},
};

}  // namespace

int main() {
    run_crc32c_cases();
    for (const Kind kind : {Kind::threads, Kind::io_uring}) {
        const char* engine = kind == Kind::threads ? "threads" : "io_uring";
        for (const Kernel& kernel : kernels) {
            const bool real = &kernel == kernels.data();
            if (kind == Kind::io_uring && real && !io_uring_support().available()) {
                std::printf("skipped: io_uring on this kernel: %s\n", io_uring_support().reason.c_str());
                continue;
            }
            for (const Case& one : cases()) {
                std::printf("%s, %s: %s\n", engine, kernel.name, one.name);
                std::fflush(stdout);
                one.run([&](Settings settings) {
                    settings.kind = kind;
                    return std::make_unique<Engine>(settings, kernel.make());
                });
            }
        }
        std::printf("%s: faults\n", engine);
        std::fflush(stdout);
        run_fault_cases(kind);
    }
    std::printf("all hold\n");
}
