// The device's random numbers: the CPU's generator, drawn from in the order in which the host issues operators.
#pragma once

#include <ATen/core/Generator.h>

namespace late {

const at::Generator& default_generator();
at::Generator new_generator();
at::Generator host_generator(const at::Generator& generator);  // the CPU's generator inside of one of the device

}  // namespace late
