// The parts of zinf_compile._csrc, one function for each.
//
// Ownership: what they define belongs to the module.
// Threads: called once, with the GIL held, while the module is imported.
#pragma once

#include <nanobind/nanobind.h>

namespace zinf {

void bind_engine(nanobind::module_& m);
void bind_mt19937(nanobind::module_& m);

}  // namespace zinf
