"""The arithmetic of shards: rank r's contiguous 1/N of a unit, flat, padded to a multiple of N."""

from __future__ import annotations


def shard_numel(numel: int, world_size: int) -> int:
    """Return the elements of every rank's shard, padding included."""
    return -(-numel // world_size)


def shard_range(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the [start, end) of the unit's elements that rank holds; empty where only padding is left."""
    size = shard_numel(numel, world_size)
    return min(rank * size, numel), min((rank + 1) * size, numel)
