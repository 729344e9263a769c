// Python bindings of the generator's state, wrapped by zinf_compile/init/mt19937.py.
//
// Ownership: Python owns the states. Memory is passed as an address, which mt19937.py keeps alive.
// Threads: called with the GIL held, released while numbers are skipped: one thread at a time may use a state.
#include <cstdint>

#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "random/mt19937.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace zinf {
namespace {

Mt19937 read_state(std::uintptr_t address, std::size_t used) {
    Mt19937::State state;
    const auto* words = reinterpret_cast<const std::uint64_t*>(address);
    for (std::size_t i = 0; i < state.size(); ++i) state[i] = static_cast<std::uint32_t>(words[i]);
    return {state, used};
}

void write_state(const Mt19937& generator, std::uintptr_t address) {
    auto* words = reinterpret_cast<std::uint64_t*>(address);
    for (std::size_t i = 0; i < Mt19937::words; ++i) words[i] = generator.state()[i];
}

}  // namespace

void bind_mt19937(nb::module_& m) {
    nb::class_<Mt19937>(m, "Mt19937", "A state of the generator MT19937.")
        .def("__init__", [](Mt19937* self, std::uintptr_t words, std::size_t used) { new (self) Mt19937(read_state(words, used)); },
             "words"_a, "used"_a)
        .def("copy", [](const Mt19937& self) { return Mt19937(self); }, "Return another generator in the same state.")
        .def_prop_ro("used", &Mt19937::used, "How many of the state's 624 numbers are used up.")
        .def("write_state", &write_state, "words"_a, "Write the state as 624 64-bit integers to an address.")
        .def("skip", &Mt19937::skip, "count"_a, nb::call_guard<nb::gil_scoped_release>(), "Pass over as many numbers.");
}

}  // namespace zinf
