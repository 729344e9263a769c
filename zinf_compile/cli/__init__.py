"""The `zinf` command.

bench_io — `zinf bench-io DIR`: measures a drive's bandwidth, in bursts and sustained, through the I/O engine that training
    uses.
colors — Colours for the text of a dump on a terminal.
consolidate — `zinf consolidate`: writes the model of a checkpoint as one set of files that transformers loads.
doctor — `zinf doctor`: reports the machine's support for offloading, and obstacles.
dump_error — The error of commands, and how errors of the user's own code become one.
gpu_selftest — `zinf doctor --gpu-selftest`: runs on this machine's accelerator what tests show on simulated ones, in two
    minutes.
inspect_checkpoint — `zinf inspect`: prints what is in a checkpoint that `zinf_compile.save` has made.
main — The `zinf` command: parses arguments, runs a subcommand, prints the dump of a schedule.
measure_machine — Measures this machine: products, memory, links, a folder's drive, as a profile.
models — Built-in models of the command line, to inspect a schedule without writing one.
output_files — What commands write: files, tried before the work and written behind it, and what they print.
plan — `zinf plan`: what a model's step comes to on a machine, with these budgets.
plan_explained — The formulas of ZeRO with a model's numbers.
quota — Disk quotas of this user and group, read from the kernel.
selftest_check — What a check of the GPU self-test returns or raises.
selftest_training — Checks of the GPU self-test that train: a small GPT, whose bits are those of eager PyTorch wherever its
    states live.
selftest_transfers — Checks of the GPU self-test that only copy: host memory that is locked, the link's speed, and copies
    beside compute.
step_on_paper — The problem of a target's step, traced on fake tensors; the deepest models with few of their blocks.
target — Finds the model that a command line names.
timed_transfers — Seconds of transfers and regions on a machine's profile.
trace — Traces a model on fake tensors and returns its scheduled graphs, without allocating a weight.
trace_step — Graphs of a step with gathers just in time, from fake tensors: what problems of steps are made of.
"""
