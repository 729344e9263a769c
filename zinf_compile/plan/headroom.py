"""Memory left within the caps, and how a graph's transfers share it. `sharded/budget` calls `plan_graph`."""

from __future__ import annotations

import math

from zinf_compile.ir.sizes import CHUNK_BUFFERS, STAGING_BYTES, UNFORESEEN, Sides
from zinf_compile.ir.tiers import Topology

from .graph_plan import BUCKETS_GATHERED, BUCKETS_ON_THE_WAY, BUCKETS_REDUCED, GraphPlan
from .memory_model import MemoryModel, TransientMemory


class Headroom:
    """Bytes left within the caps, for uses that profit from more memory."""

    def __init__(self, spare: Sides, topology: Topology) -> None:
        self._left = spare.device, spare.host
        self._topology = topology

    def take(self, most: int, device: float, host: float = 0) -> int:
        """Take up to `most` items of `device` and `host` bytes each, and return how many fit."""
        each = (device, host) if self._topology.host_apart else (device + host, 0.0)
        count = max(0, min([most, *(int(left / one) for left, one in zip(self._left, each, strict=True) if one)]))
        self._left = self._left[0] - math.ceil(count * each[0]), self._left[1] - math.ceil(count * each[1])
        return count


def plan_graph(
    model: MemoryModel,
    transient: TransientMemory,
    *,
    spare: Sides,
    bucket_bytes: int,
    one_ahead: int,
    gathers_first: bool = False,
) -> GraphPlan:
    """Decide how far ahead one graph runs with `spare` bytes left within the caps.

    `one_ahead`: bytes gathered or being swapped in if the look-ahead alone bounds the schedule, the most that it can use. Memory
    goes to chunks of the step first, then to gathers up to the default number of buckets, gradients, staging, and more gathers;
    with `gathers_first` to all gathers before gradients: each region's own are counted without that. One part in `UNFORESEEN`
    stays free.
    """
    headroom = Headroom(Sides(*(left - left // UNFORESEEN for left in spare)), model.topology)
    chunk_buffers = 1 + headroom.take(CHUNK_BUFFERS - 1, *model.chunk)
    widest = max(BUCKETS_ON_THE_WAY * bucket_bytes, math.ceil(BUCKETS_GATHERED * bucket_bytes * transient.widening))
    wished_ahead = max(0, max(widest, one_ahead) - transient.full) if transient.gathered else 0
    wished_reduced = max(0, BUCKETS_REDUCED * bucket_bytes - transient.reduced) if transient.reduced else 0
    wished_staging = max(0, STAGING_BYTES - model.staging) if model.staging else 0
    first_ahead = wished_ahead if gathers_first else min(widest - transient.full, wished_ahead)
    ahead = headroom.take(first_ahead, transient.on_device, transient.on_host)
    reduced = headroom.take(wished_reduced, 1)
    staging = headroom.take(wished_staging, 0, 1)
    ahead += headroom.take(wished_ahead - ahead, transient.on_device, transient.on_host)
    return GraphPlan(
        ahead=ahead,
        reduced=reduced,
        staging=staging,
        chunk_buffers=chunk_buffers,
        wish=Sides(
            (CHUNK_BUFFERS - 1) * model.chunk.device
            + math.ceil(wished_ahead * transient.on_device)
            + wished_reduced
            + model.topology.counted(Sides(0, wished_staging)).device,
            (CHUNK_BUFFERS - 1) * model.chunk.host + math.ceil(wished_ahead * transient.on_host) + wished_staging,
        ),
    )
