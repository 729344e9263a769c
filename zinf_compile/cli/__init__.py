"""The `zinf` command.

bench_io — `zinf bench-io DIR`: how fast a folder's drive is, in bursts and for longer, through the engine that training
    uses.
colors — Colours for the text of a dump, where a terminal shows it.
doctor — `zinf doctor`: what this machine offers for offloading, and what stands in the way.
main — The `zinf` command.
models — Models that the command line knows by name, to look at a schedule without writing one.
quota — Disk quotas of this user and group, as the kernel counts them.
trace — Trace a model and look at its schedule, without allocating a weight.
"""
