"""What `torch.compile` calls: capture, passes, and the callable that runs a graph. Calls every other folder; only the command
line stands above it.

bind — Binds the arguments of one call to the units of the graph's parameter slots; partitions parameters at their first
    call.
capture — Reads a Dynamo graph's inputs into slots: which are parameters, which buffers, and whether they can be
    partitioned.
choices — Choices that the ranks make together, once per parameter, from sizes that they exchange; later graphs reuse them.
double_backward — Rejects double backward, which AOTAutograd doesn't support for compiled graphs, with an error in the
    user's terms.
fork_pool — Runs jobs in forked worker processes, for their effects on disk, such as filling Inductor's cache.
graph_compiler — The torch.compile backend: capture, passes, lowering, and the callable that runs the program.
placement_of_inputs — Takes the placement of a graph from its parameters that are partitioned already.
regions — Compiles regions through Inductor: each distinct structure once, several in parallel.
static_shapes — Specialises a graph that Dynamo captured with dynamic sizes to the sizes of this call.
"""

from .graph_compiler import zero_infinity

__all__ = ["zero_infinity"]
