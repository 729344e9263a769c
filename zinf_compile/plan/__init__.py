"""Memory of a captured graph on one rank, and how far ahead its transfers run within the caps. Values and pure functions: no
FX, no runtime, no live memory, so that all of it works on a laptop.

headroom — Memory left within the caps, and how a graph's transfers share it. `sharded/budget` calls `plan_graph`.
memory_model — The one formula for memory: device and host bytes that the parameters of a graph take.
plan — Values that passes and the budget exchange: memory needs of a graph, and how far ahead it runs.
"""
