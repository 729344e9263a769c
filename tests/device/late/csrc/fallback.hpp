// Any operator on the device: shapes from PyTorch's kernels without memory, values from the CPU's kernel on the current stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace late {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Takes the fallback, and so the CPU's kernel, for operators that PyTorch would otherwise compose of others: the same bits as on the CPU.
void prefer_cpu_kernels();

}  // namespace late
