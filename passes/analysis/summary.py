"""Summary of a scheduled graph: one line per transfer, one per region of compute. `zinf dump` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import SCHEDULE_OPS, has_unit
from zinf_compile.passes.graph.node_facts import (
    fake_value,
    module_of,
    part_of,
    skipped_notes,
    slot_behind,
    slot_of,
    starts_region,
    values_behind,
)
from zinf_compile.passes.graph.remade import runs_again
from zinf_compile.passes.graph.token_loop import TokenLoop

from .fold_blocks import Entry, fold
from .print_graph import graph_text_line, with_sizes
from .region_facts import blocks_of, kind_of, operations_of, shape_of

_NAMED = 4
"""Operators that a region's line names. A region of more shows their number."""

_BLOCKS = 2
"""Blocks that a region's line names. A region of more shows the first and the last."""

_PREFIXES = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


def summarize(gm: fx.GraphModule, *, world_size: int = 1) -> str:
    """Print a scheduled graph: a line for each transfer, and one for the compute between two.

    Blocks of equal structure are printed once. A region's line shows its number of operators, its blocks, and the floating-point
    operations of its products, convolutions and attention.
    """
    lines = [f"# {what}" for what in skipped_notes(gm)]
    return "\n".join([*lines, *fold(list(_entries(gm, world_size)))]) + "\n"


def _entries(gm: fx.GraphModule, world_size: int) -> Iterator[Entry]:
    region: list[fx.Node] = []
    number = 0
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        ends = node.op == "output" or node.target in SCHEDULE_OPS
        if region and (ends or starts_region(node)):
            yield _region(number, region)
            number, region = number + 1, []
        if node.op == "output":
            yield Entry(_returned(node), key=("output",))
        elif ends:
            line = with_sizes(graph_text_line(node), node, world_size=world_size)
            if values := values_behind(node):
                key = (str(node.target), *map(shape_of, values), *_tiers(node))
                yield Entry(line, key=key, names=tuple(filter(None, map(module_of, values))))
                continue
            if not has_unit(node.target):
                yield Entry(line, key=(str(node.target),))
                continue
            unit = slot_behind(node)
            yield Entry(line, key=(str(node.target), unit.shape, unit.dtype, *_tiers(node)), names=(unit.name,))
        else:
            region.append(node)


def _region(number: int, nodes: Sequence[fx.Node]) -> Entry:
    kinds = [kind_of(node) for node in nodes if kind_of(node) != "getitem"]
    what = ", ".join(kinds) if len(kinds) <= _NAMED else f"{len(kinds)} operators"
    where = blocks_of(nodes)
    line = f"region {number}: {what}" + (f" of {_listed(where)}" if where else "") + (" again" if runs_again(nodes[-1]) else "")
    operations = sum(map(operations_of, nodes))
    if operations >= _PREFIXES[-1][0]:
        scale, unit = next(pair for pair in _PREFIXES if operations >= pair[0])
        line += f", {operations / scale:.2g} {unit}" if operations < 10 * scale else f", {operations / scale:,.0f} {unit}"
    parts = [node for node in nodes if part_of(node)]
    if parts:
        largest = max(parts, key=lambda node: fake_value(node).nbytes)
        line = f"{line:<60}  # {part_of(largest)} {fake_value(largest).nbytes:,} B"
    slices = [node.target.tile for node in nodes if isinstance(node.target, TokenLoop)]
    if slices:
        line = f"{line:<60}  # slices of {slices[0]} tokens"
    return Entry(line, key=("region", *((kind_of(node), *shape_of(node)) for node in nodes)), names=tuple(where))


def _tiers(node: fx.Node) -> tuple[object, ...]:
    return tuple(arg for arg in node.args if isinstance(arg, str))


def _listed(blocks: Sequence[str]) -> str:
    return " and ".join(blocks) if len(blocks) <= _BLOCKS else f"{blocks[0]} to {blocks[-1]}"


def _returned(node: fx.Node) -> str:
    """Return the line of the outputs: counts of gradients, hollow parameters and computed values, with bytes of the last."""
    values: Any = node.args[0]
    given = [v for v in (values if isinstance(values, (tuple, list)) else (values,)) if isinstance(v, fx.Node)]
    gradients = sum(v.target in (ops.reduce_scatter, ops.swap_out) for v in given)
    hollow = sum(slot_of(v) is not None for v in given)
    computed = (v for v in given if v.op != "placeholder" and v.target not in SCHEDULE_OPS)
    made = [v for v in computed if isinstance(v.meta.get("val"), torch.Tensor)]
    size = f", {sum(fake_value(v).nbytes for v in made):,} B" if all(map(_is_static, made)) else ""
    parts = [f"{gradients} gradients"] if gradients else []
    parts += [f"{len(made)} made here{size}"] if made else []
    parts += [f"{hollow} hollow parameters"] if hollow else []
    return f"return {len(given)} values" + (f": {'; '.join(parts)}" if parts else "")


def _is_static(node: fx.Node) -> bool:
    return all(re.fullmatch(r"\d+", str(size)) for size in fake_value(node).shape)


__all__ = ["summarize"]
