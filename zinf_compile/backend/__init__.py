"""What `torch.compile` calls: capture, passes, and the callable that runs a graph. Calls every other folder; only the command
line stands above it.

bind — From the arguments of one call to the units that fill the graph's slots; parameters seen for the first time are
    partitioned.
capture — What Dynamo captured, read into slots: which inputs are parameters, which are buffers, and whether they can be
    partitioned.
choices — What ranks decide once for each parameter, from figures that they exchange, and every later graph follows.
double_backward — Gradients of gradients: AOTAutograd has none for compiled graphs, and the error says so in the user's
    words.
fork_pool — Run jobs in forked copies of this process, for what they leave on disk.
graph_compiler — The torch.compile backend: capture, passes, program, and the callable that runs it.
placement_of_inputs — Where the states of parameters live that were partitioned before: graphs compiled later go by that.
regions — Compile regions through Inductor: each distinct structure once, several at a time.
static_shapes — Trace a graph for the sizes at hand alone, where Dynamo captured it for any.
"""

from .graph_compiler import zero_infinity

__all__ = ["zero_infinity"]
