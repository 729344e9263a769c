"""The `zinf` command.

bench_io — `zinf bench-io DIR`: measures a drive's bandwidth, in bursts and sustained, through the I/O engine that training
    uses.
colors — Colours for the text of a dump, where a terminal shows it.
doctor — `zinf doctor`: reports what this machine offers for offloading, and obstacles.
main — The `zinf` command.
models — Built-in models of the command line, to inspect a schedule without writing one.
quota — Disk quotas of this user and group, read from the kernel.
trace — Traces a model on fake tensors and returns its scheduled graphs, without allocating a weight.
"""
