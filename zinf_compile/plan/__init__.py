"""What a rank's memory must hold for a captured graph, and how far ahead its transfers may run within the caps. Values and pure
functions: no FX, no runtime, no live memory, so that all of it works on a laptop.

headroom — What is left within the caps, and what a graph's transfers take of it.
memory_model — The one formula for memory: bytes of the device and of host memory that the parameters of a graph take.
plan — The values that passes and the budget exchange: the memory that a graph needs, and how far ahead it runs.
"""
