"""Which full units stay gathered from a forward to its backward, decided right after the cut. `decide_memory` calls it.

Note: ranks
    Units that are kept are not gathered in the backward, so all ranks keep the same ones: what the rank with the least room has
    room for. A rank that compiles again alone keeps those that were agreed for the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from torch import fx

from zinf_compile._torch import outside_tracing
from zinf_compile.config import AUTO, Config
from zinf_compile.ir.sizes import CHUNK_BUFFERS
from zinf_compile.passes.analysis.keepable_units import KeepableUnit, find_keepable
from zinf_compile.passes.schedule.keep_for_backward import keep_for_backward
from zinf_compile.plan.graph_plan import BUCKETS_ON_THE_WAY, BUCKETS_REDUCED
from zinf_compile.plan.kept_units import choose_kept
from zinf_compile.sharded.budget import GraphBudget
from zinf_compile.sharded.short_ranks import least_of_ranks


def keep_units(
    graphs: Sequence[fx.GraphModule],
    own_outputs: int,
    config: Config,
    budget: GraphBudget,
    *,
    bucket_bytes: int,
    spare: Callable[[], int],
    together: bool,
) -> str:
    """Keep units gathered from a forward to its backward; return what was decided as text, empty where nothing was kept.

    `graphs` are the two, right from the cut; one without a backward keeps nothing. `spare`: asked for the bytes that the device's
    cap leaves beside all that was decided, where that decides. `together`: ranks compile at the same point, and agree.
    """
    context, word = budget.context, config.reshard_after_forward
    if len(graphs) < 2 or context.size == 1 or word is True or not config.reshard_after_backward:  # they stay beyond it
        return ""
    if word == AUTO and (budget.measuring or not budget.compute.counts):
        return ""
    forward, backward = graphs
    units = find_keepable(forward.graph, backward.graph)
    kept: Sequence[KeepableUnit] = units
    if word == AUTO:
        with outside_tracing():
            kept = _chosen(units, budget, lambda: spare() - _reserve(units, budget, bucket_bytes), together=together)
        budget.keepable = sum(unit.bytes for unit in units) - sum(unit.bytes for unit in kept)
    if not kept:
        return ""
    keep_for_backward(forward, backward=backward, own_outputs=own_outputs, units=kept)
    count = sum(unit.bytes for unit in kept)
    return f"gathered  {count / sum(unit.bytes for unit in units):.0%} kept for the backward"


def _chosen(units: Sequence[KeepableUnit], budget: GraphBudget, room: Callable[[], int], *, together: bool) -> list[KeepableUnit]:
    agreed = budget.context.memory.reservations.kept
    key: Hashable = budget.signature, tuple((unit.slot.name, unit.slot.shape, unit.dtype) for unit in units)
    if together and units:
        least = max(0, least_of_ranks(budget.context, room(), what="room for units that stay gathered"))
        agreed[key] = tuple(choose_kept([unit.bytes for unit in units], least / (1 + budget.others)))
    return [units[number] for number in agreed.get(key, ())]


def _reserve(units: Sequence[KeepableUnit], budget: GraphBudget, bucket_bytes: int) -> int:
    """Return what transfers that run ahead would use of what is left, and further chunks of the step."""
    most = sum(unit.bytes for unit in units)
    ahead = min(most, BUCKETS_ON_THE_WAY * bucket_bytes) + min(most, BUCKETS_REDUCED * bucket_bytes)
    return ahead + (CHUNK_BUFFERS - 1) * budget.model.chunk.device
