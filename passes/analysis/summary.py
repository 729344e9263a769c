"""Summary of a scheduled graph: one line per transfer, one per region of compute. `zinf dump` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from zinf_compile.ir import compute_ops, ops
from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.passes.graph.node_facts import (
    fake_value,
    module_of,
    part_of,
    skipped_notes,
    slot_behind,
    slot_of,
    starts_region,
)

from .blocks import block_of
from .fold_blocks import Entry, fold
from .print_graph import graph_text_line, with_sizes

aten = torch.ops.aten

_AS = {compute_ops.mm_out: aten.mm, compute_ops.addmm_out: aten.addmm}
"""Products that write into a given matrix, their first argument, and the operators that count their operations."""

_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
"""Attention of the CPU, which PyTorch doesn't count, and the GPU's, which takes as many operations."""

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
            unit = slot_behind(node)
            line = with_sizes(graph_text_line(node), node, world_size=world_size)
            yield Entry(line, key=(str(node.target), unit.shape, unit.dtype, *_tiers(node)), names=(unit.name,))
        else:
            region.append(node)


def _region(number: int, nodes: Sequence[fx.Node]) -> Entry:
    kinds = [_kind(node) for node in nodes if _kind(node) != "getitem"]
    what = ", ".join(kinds) if len(kinds) <= _NAMED else f"{len(kinds)} operators"
    where = _blocks(nodes)
    line = f"region {number}: {what}" + (f" of {_listed(where)}" if where else "")
    operations = sum(map(_operations, nodes))
    if operations >= _PREFIXES[-1][0]:
        scale, unit = next(pair for pair in _PREFIXES if operations >= pair[0])
        line += f", {operations / scale:.2g} {unit}" if operations < 10 * scale else f", {operations / scale:,.0f} {unit}"
    parts = [node for node in nodes if part_of(node)]
    if parts:
        largest = max(parts, key=lambda node: fake_value(node).nbytes)
        line = f"{line:<60}  # {part_of(largest)} {fake_value(largest).nbytes:,} B"
    return Entry(line, key=("region", *((_kind(node), *_shape(node)) for node in nodes)), names=tuple(where))


def _kind(node: fx.Node) -> str:
    if node.op == "get_attr":
        return "constant"
    target: Any = node.target
    return str(target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else target.__name__)


def _tiers(node: fx.Node) -> tuple[object, ...]:
    return tuple(arg for arg in node.args if isinstance(arg, str))


def _shape(node: fx.Node) -> tuple[object, ...]:
    value = node.meta.get("val")
    return (str(tuple(value.shape)), value.dtype) if isinstance(value, torch.Tensor) else ()


def _blocks(nodes: Sequence[fx.Node]) -> list[str]:
    """Return the blocks of the operators in order of appearance; their modules where no block is known."""
    modules = [module for node in nodes if (module := module_of(node))]
    return list(dict.fromkeys(filter(None, map(block_of, modules)))) or list(dict.fromkeys(modules))


def _listed(blocks: Sequence[str]) -> str:
    return " and ".join(blocks) if len(blocks) <= _BLOCKS else f"{blocks[0]} to {blocks[-1]}"


def _operations(node: fx.Node) -> int:
    """Return an operator's floating-point operations; 0 where PyTorch has no formula, or sizes are dynamic."""
    target: Any = node.target
    arguments = list(node.args)
    if target in _AS:
        target, arguments = _AS[target], arguments[1:]
    packet = getattr(target, "overloadpacket", target)
    count = flop_registry.get(_ATTENTION.get(packet, packet))
    if count is None:
        return 0
    given: Any = (arguments, dict(node.kwargs), node)
    values, named, out = fx.node.map_arg(given, lambda n: n.meta.get("val"))
    if packet in _ATTENTION:
        values, named = _with_equal_heads(values[: 4 if "backward" in str(packet) else 3]), {}
    found = count(*values, **named, out_val=out)
    return int(found) if isinstance(found, int) else 0


def _with_equal_heads(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Expand keys and values that several heads share to one per head, as the formula expects."""
    heads = values[0].shape[1]
    return [v if v.shape[1] == heads else v[:, :1].expand(-1, heads, -1, -1) for v in values]


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
