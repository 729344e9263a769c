"""The pipeline of passes, in order, and `run_passes`. The backend and the tests call it; no pass imports the runtime.

Each pass is one function in the file of its name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from zinf_compile._torch import LazyGraphModule
from zinf_compile.ir.compute_shape import CHUNK_BYTES
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.activations.drop_saved_values import drop_saved_values
from zinf_compile.passes.activations.fetch_saved_values import fetch_saved_values
from zinf_compile.passes.activations.offload_saved_values import offload_saved_values
from zinf_compile.passes.activations.remake_saved_values import remake_saved_values
from zinf_compile.passes.analysis.planned_graph import Planner
from zinf_compile.passes.analysis.saved_memories import returned
from zinf_compile.passes.graph.node_facts import Counts, counts_all, leaving, returning, tile_of
from zinf_compile.passes.joint.align_products import align_products
from zinf_compile.passes.joint.decompose_kept_ops import decompose_kept_ops
from zinf_compile.passes.joint.insert_reduce_scatters import insert_reduce_scatters
from zinf_compile.passes.joint.recompute_unit_views import recompute_unit_views
from zinf_compile.passes.loss._read_logits import Logits
from zinf_compile.passes.loss.chunk_loss import chunk_loss
from zinf_compile.passes.schedule.align_regions import align_regions
from zinf_compile.passes.schedule.drop_gathers import drop_gathers
from zinf_compile.passes.schedule.group_units import group_units
from zinf_compile.passes.schedule.hand_on_units import hand_on_units
from zinf_compile.passes.schedule.insert_gathers import insert_gathers
from zinf_compile.passes.schedule.insert_releases import insert_releases
from zinf_compile.passes.schedule.insert_row_lookups import insert_row_lookups
from zinf_compile.passes.schedule.insert_swaps import Path, insert_swaps
from zinf_compile.passes.schedule.keep_gathered import keep_gathered
from zinf_compile.passes.schedule.merge_gathers import merge_gathers
from zinf_compile.passes.schedule.narrow_gathers import narrow_gathers
from zinf_compile.passes.schedule.prefetch import prefetch
from zinf_compile.passes.schedule.prefetch_swaps import prefetch_swaps
from zinf_compile.passes.schedule.read_kept_units import read_kept_units
from zinf_compile.passes.schedule.sink_unit_views import sink_unit_views
from zinf_compile.passes.schedule.start_gathers import start_gathers
from zinf_compile.passes.schedule.start_swaps import start_swaps
from zinf_compile.passes.tiling.accumulate_in_place import accumulate_in_place
from zinf_compile.passes.tiling.lift_tiles import lift_tiles
from zinf_compile.passes.tiling.reduce_tiles_in_place import reduce_tiles_in_place
from zinf_compile.passes.tiling.sink_tile_gradients import sink_tile_gradients
from zinf_compile.passes.tiling.tile_matmuls import tile_matmuls
from zinf_compile.passes.tiling.tile_pointwise import tile_pointwise
from zinf_compile.passes.tiling.write_tiles_in_place import write_tiles_in_place
from zinf_compile.passes.tokens.tile_tokens import tile_tokens
from zinf_compile.plan.graph_plan import BUCKETS_GATHERED, BUCKETS_ON_THE_WAY

from .verify import verify

Pass = Callable[[fx.GraphModule], fx.GraphModule]
Observer = Callable[[str, fx.GraphModule], None]
Limits = Callable[[fx.Graph], tuple[int, int]]

IN_PLACE: tuple[Pass, ...] = accumulate_in_place, write_tiles_in_place, reduce_tiles_in_place
"""The last passes: the products of tiles into memory that is there."""

LOOK_AHEAD = 1
"""Groups gathered ahead of the one in use. Measured (benchmarks/prefetch.py, two gloo ranks on two cores, 124M and 11M GPTs):
none ahead costs 2 %, two or three gain nothing that can be told from noise."""


def inference_passes(
    *,
    chunk: bool | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    worth: Callable[[Logits], bool] | None = None,
    rows: Callable[[ParameterSlot], bool] | None = None,
    rules: Mapping[Any, Callable[..., Any]] | None = None,
    token_tile: int | None = None,
    small: bool = True,
    align: bool = True,
) -> tuple[Pass, ...]:
    """Rewrites of a graph that has no backward, before its schedule is written.

    `chunk` and `worth` select the losses that are computed in chunks, each of `chunk_bytes`. `rows` selects the parameters of
    which rows are gathered by index. `rules` decompose the operators that were kept for `chunk_loss`.
    `token_tile` and `small` are those of `tile_tokens`. `align`: whether products are aligned.
    """
    return (
        partial(chunk_loss, enabled=chunk, chunk_bytes=chunk_bytes, worth=worth),
        partial(decompose_kept_ops, table=rules or {}),
        partial(insert_row_lookups, chosen=rows or (lambda slot: False)),
        partial(tile_tokens, tile_bytes=token_tile, small=small),
        tile_matmuls,
        tile_pointwise,
        *((align_products,) if align else ()),
    )


def joint_passes(
    *,
    chunk: bool | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    worth: Callable[[Logits], bool] | None = None,
    rows: Callable[[ParameterSlot], bool] | None = None,
    rules: Mapping[Any, Callable[..., Any]] | None = None,
    token_tile: int | None = None,
    small: bool = True,
    align: bool = True,
) -> tuple[Pass, ...]:
    """Rewrites of the joint graph, before it is partitioned into forward and backward. Options as in `inference_passes`."""
    return (
        *inference_passes(
            chunk=chunk,
            chunk_bytes=chunk_bytes,
            worth=worth,
            rows=rows,
            rules=rules,
            token_tile=token_tile,
            small=small,
            align=False,
        ),
        recompute_unit_views,
        *((align_products,) if align else ()),
        insert_reduce_scatters,
    )


def ordinary_passes(*, bucket_bytes: int) -> tuple[Pass, ...]:
    """The regions of a graph none of whose parameters is partitioned: those that it would have if they were."""
    return (
        sink_unit_views,
        partial(insert_gathers, keep_bytes=BUCKETS_GATHERED * bucket_bytes),
        partial(align_regions, region_bytes=bucket_bytes),
        drop_gathers,
    )


def region_passes(*, bucket_bytes: int) -> tuple[Pass, ...]:
    """Gathers just in time, and all transfers at the boundaries of regions: what `step_problem` reads, and plans refer to."""
    return (
        lift_tiles,
        sink_unit_views,
        sink_tile_gradients,
        partial(insert_gathers, keep_bytes=BUCKETS_GATHERED * bucket_bytes),
        narrow_gathers,
        partial(group_units, bucket_bytes=bucket_bytes),
        insert_releases,
        partial(align_regions, region_bytes=bucket_bytes),
        drop_saved_values,
        remake_saved_values,
        read_kept_units,
    )


def graph_passes(
    *,
    bucket_bytes: int,
    params: Path = (),
    grads: Path = (),
    limits: Limits | None = None,
    plan: Planner | None = None,
    counts: Counts = counts_all,
    hops: Callable[[Tier], Sequence[str]] = lambda tier: (),
) -> tuple[Pass, ...]:
    """The schedule of one graph: forward, backward or inference.

    `params` are the tiers of a shard's path to the device, `grads` those of a gradient's path from it, both empty for states on
    the device, or functions of a parameter. `limits` takes a graph whose gathers are just in time and returns two limits in
    bytes: for gathered units, and for gathered units together with those being swapped in; `counts` says which units take memory.
    `plan` takes the same graph and plans it: then all that moves does so where the plan says, and `limits` are not asked.
    `hops` are the tiers from one to the device, which saved values pass that leave it between forward and backward.
    """
    if plan is not None:
        return (*region_passes(bucket_bytes=bucket_bytes), *planned_passes(params=params, grads=grads, plan=plan, hops=hops))
    default = (BUCKETS_GATHERED * bucket_bytes, BUCKETS_ON_THE_WAY * bucket_bytes)
    decided = cache(limits or (lambda graph: default))  # one decision for both passes
    return (
        *region_passes(bucket_bytes=bucket_bytes),
        partial(prefetch, look_ahead=LOOK_AHEAD, limit_bytes=lambda graph: decided(graph)[0], counts=counts),
        merge_gathers,
        partial(insert_swaps, params=params, grads=grads),
        partial(prefetch_swaps, look_ahead=LOOK_AHEAD, limit_bytes=lambda graph: decided(graph)[1], counts=counts),
        *_last_passes(hops),
    )


def planned_passes(
    *, params: Path = (), grads: Path = (), plan: Planner, hops: Callable[[Tier], Sequence[str]] = lambda tier: ()
) -> tuple[Pass, ...]:
    """The passes that act a plan out, of a graph that `region_passes` have seen. Parameters as those of `graph_passes`."""
    once = cache(plan)  # of the graph as the first of these passes finds it
    return (
        partial(keep_gathered, plan=once),
        partial(hand_on_units, plan=once),
        partial(start_gathers, plan=once),
        partial(insert_swaps, params=params, grads=grads),
        partial(start_swaps, plan=once),
        *_last_passes(hops),
    )


def _last_passes(hops: Callable[[Tier], Sequence[str]]) -> tuple[Pass, ...]:
    return (*IN_PLACE, *_moves(hops))


def _moves(hops: Callable[[Tier], Sequence[str]]) -> tuple[Pass, ...]:
    return partial(offload_saved_values, hops=hops), partial(fetch_saved_values, hops=hops)


def just_in_time(gm: fx.GraphModule, bucket_bytes: int) -> fx.GraphModule:
    """Return a copy of a graph that `region_passes` have seen, for decisions about it: the compiler goes on with the original."""
    return run_passes(copied(gm), region_passes(bucket_bytes=bucket_bytes))


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph, to try out what may become of it."""
    found = LazyGraphModule(gm, copy.deepcopy(gm.graph))
    found.meta.update(gm.meta)
    return found


def as_performed(graph: fx.Graph, *, hops: Callable[[Tier], Sequence[str]] = lambda tier: ()) -> fx.Graph:
    """Return a graph in the middle of `graph_passes` as it will compute in the end: tiles in place, saved values moved.

    Its transfers of units are just in time. `hops`: as that of `graph_passes`. What it returns, or moves and returns, has the
    name that the given graph has for it, as the backward and the choices of what moves do: a matrix has its concatenation's.
    """
    owner = graph.owning_module
    moves = isinstance(owner, fx.GraphModule) and bool(leaving(owner) or returning(owner))
    if not moves and not any(tile_of(node) for node in graph.nodes if node.op == "placeholder"):
        return graph
    gm: fx.GraphModule = LazyGraphModule(owner or torch.nn.Module(), copy.deepcopy(graph))
    if moves:
        gm.meta.update(owner.meta)  # type: ignore[union-attr]
    for step in IN_PLACE:
        gm = step(gm)
    for before, node in zip(returned(graph), returned(gm.graph), strict=True):
        if isinstance(node, fx.Node) and node.name != before.name:
            node.name = before.name  # free again: nothing is left of what had it
    for step in _moves(hops):
        gm = step(gm)
    return gm.graph


def pass_name(step: Pass) -> str:
    """Return the name of a pass, as `zinf dump` takes it."""
    return (step.func if isinstance(step, partial) else step).__name__


def run_passes(
    gm: fx.GraphModule, passes: Sequence[Pass], *, observe: Observer | None = None, verify_each: bool = False
) -> fx.GraphModule:
    """Run the passes in order; lint the graph after the last one. With `verify_each`, lint and verify it after each."""
    for step in passes:
        gm = step(gm)
        if verify_each:
            gm.graph.lint()
            verify(gm, complete=False)
        if observe is not None:
            observe(pass_name(step), gm)
    gm.graph.lint()
    return gm


__all__ = [
    "Pass",
    "copied",
    "graph_passes",
    "inference_passes",
    "joint_passes",
    "just_in_time",
    "pass_name",
    "planned_passes",
    "region_passes",
    "run_passes",
    "verify",
]
