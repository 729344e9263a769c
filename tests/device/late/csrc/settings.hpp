// PyTorch's settings of a thread that kernels depend on: taken where work is issued, applied where it runs.
#pragma once

namespace late {

struct Settings {
  int threads;  // within an operator
  bool grad;    // some kernels are chosen by it

  static Settings here();
  void apply() const;  // on a stream's thread
};

// Sets up a stream's thread: no autograd, no autocast, nothing but the CPU's kernels.
void thread_settings();

}  // namespace late
