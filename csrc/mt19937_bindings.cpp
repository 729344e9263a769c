// The stream as Python sees it. zinf_compile/init/mt19937.py makes of it what the rest uses.
//
// Ownership: Python owns streams. Memory is passed as an address, which mt19937.py keeps alive.
// Threads: called with the GIL held, released while numbers are made: one thread at a time may use a stream.
#include <cstdint>
#include <span>

#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "random/mt19937.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zinf {
namespace {

template <typename T>
std::span<T> at(std::uintptr_t address, std::size_t count) {
    return {reinterpret_cast<T*>(address), count};
}

Mersenne read_state(std::uintptr_t address, std::size_t used) {
    Mersenne::State state;
    const auto words = at<const std::uint64_t>(address, Mersenne::words);
    for (std::size_t i = 0; i < words.size(); ++i) state[i] = static_cast<std::uint32_t>(words[i]);
    return {state, used};
}

template <Mersenne::Kind kind>
void make_numbers(Mersenne& stream, std::uintptr_t into, std::size_t count, bool half, float first, float second) {
    if (half) {
        stream.make(kind, at<BFloat16>(into, count), first, second);
    } else {
        stream.make(kind, at<float>(into, count), first, second);
    }
}

}  // namespace

void bind_mersenne(nb::module_& m) {
    nb::class_<Mersenne>(m, "Mersenne", "A stream of MT19937's numbers.")
        .def("__init__", [](Mersenne* self, std::uintptr_t words, std::size_t used) { new (self) Mersenne(read_state(words, used)); },
             "words"_a, "used"_a)
        .def("copy", [](const Mersenne& self) { return Mersenne(self); }, "Return another stream of the same numbers.")
        .def_prop_ro("used", &Mersenne::used, "How many of the state's 624 numbers are used up.")
        .def("write_state", [](const Mersenne& self, std::uintptr_t words) {
            const auto into = at<std::uint64_t>(words, Mersenne::words);
            for (std::size_t i = 0; i < into.size(); ++i) into[i] = self.state()[i];
        }, "words"_a, "Write the state as 624 64-bit integers to an address.")
        .def("skip", &Mersenne::skip, "count"_a, nb::call_guard<nb::gil_scoped_release>(), "Pass over as many numbers.")
        .def("uniform", make_numbers<Mersenne::Kind::uniform>, "into"_a, "count"_a, "half"_a, "from_"_a, "to"_a,
             nb::call_guard<nb::gil_scoped_release>(),
             "Write numbers in [from_, to) to an address: as bfloat16 if `half`, as float32 otherwise.")
        .def("normal", make_numbers<Mersenne::Kind::normal>, "into"_a, "count"_a, "half"_a, "mean"_a, "deviation"_a,
             nb::call_guard<nb::gil_scoped_release>(), "Write normal numbers in the same way; `count` is a multiple of 16.");
}

}  // namespace zinf
