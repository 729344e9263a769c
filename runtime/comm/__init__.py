"""Collectives, and what ranks compare with each other.

collectives — Shards to full units and gradients to shards, for several units at once, straight into the buffers that
    compute uses.
ranks — What the ranks of a process group compare, exchange and share, and how they fail together.
shard_group — Over which ranks a unit is cut into shards, and which ranks have copies of the same shard: a plain value, on
    each rank its own.
shard_ranges — The arithmetic of shards: rank r's contiguous 1/N of a unit, flat, padded to a multiple of N.
steps_done — The optimizer steps that the shards of units went through, as the ranks compare them.
"""
