"""What is known about a node, behind typed accessors: the only place that knows how `node.meta` is spelled."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile._torch import prettified
from zinf_compile.ir import ops
from zinf_compile.ir.formats import StateFormat, format_of
from zinf_compile.ir.op_spec import LONE_GROUP, SPECS, position_of, unit_position
from zinf_compile.ir.program import ParameterSlot

_SLOT = "zinf_slot"
_BUFFER = "zinf_buffer"
_NAME = "zinf_name"
_REGION = "zinf_region"
_TILE_OF = "zinf_tile_of"
_JOINED = "zinf_joined"

_AFTER_ALL_CHECKPOINTS = sys.maxsize
"""Larger than any checkpoint's number: a view shared with a later checkpointed region is then still recomputed."""
_PART = "zinf_part"
_LEFT_ALONE = "zinf_left_alone"


def mark_slot(node: fx.Node, slot: ParameterSlot) -> None:
    """Say that placeholder `node` is a parameter."""
    node.meta[_SLOT] = slot


def slot_of(node: fx.Node) -> ParameterSlot | None:
    """Return the slot of a parameter's placeholder, None for any other node."""
    slot = node.meta.get(_SLOT)
    return slot if isinstance(slot, ParameterSlot) and node.op == "placeholder" else None


def mark_buffer(node: fx.Node, name: str) -> None:
    """Say that placeholder `node` is a module's buffer."""
    node.meta[_BUFFER] = name


def buffer_of(node: fx.Node) -> str | None:
    """Return the name of a buffer's placeholder, None for any other node."""
    return node.meta.get(_BUFFER) if node.op == "placeholder" else None


def mark_name(node: fx.Node, name: str) -> None:
    """Say what the user calls an input, for display."""
    node.meta[_NAME] = name


def display_name(node: fx.Node) -> str:
    """Return the name to show for a node: the user's for parameters and inputs, the graph's for the rest."""
    slot = slot_of(node)
    return slot.name if slot is not None else str((node.op == "placeholder" and node.meta.get(_NAME)) or node.name)


def module_of(node: fx.Node) -> str:
    """Return the name of the module whose code the operator, or what it is the gradient of, comes from; empty where unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return prettified(str(next(reversed(stack.values()))[0])) if stack else ""


def mark_region(node: fx.Node) -> None:
    """Say that a region starts at operator `node`, whether or not a transfer stands before it."""
    node.meta[_REGION] = True


def starts_region(node: fx.Node) -> bool:
    """Say whether a region was marked to start at the operator."""
    return bool(node.meta.get(_REGION))


def unmark_region(node: fx.Node) -> None:
    """Say that no region starts at an operator."""
    node.meta.pop(_REGION, None)


def move_region_mark(node: fx.Node, to: fx.Node) -> None:
    """Say that a region starts at another operator than it did, if one does."""
    if starts_region(node):
        unmark_region(node)
        mark_region(to)


def leave_whole(gm: fx.GraphModule, slot: ParameterSlot, reason: str) -> None:
    """Note why a parameter that is cut into tiles is gathered, or its gradient computed, as a whole."""
    what = f"tiles of {slot.name}: {reason}"
    if what not in skipped_notes(gm):
        note_skipped(gm, what)


def mark_tile(node: fx.Node, unit: fx.Node, slot: ParameterSlot) -> None:
    """Say that placeholder `node` is a tile of parameter `unit`."""
    node.meta[_SLOT] = slot
    node.meta[_TILE_OF] = unit.name


def tile_of(node: fx.Node) -> str | None:
    """Return the name of the parameter's placeholder of which `node` is a tile, None for any other node."""
    return node.meta.get(_TILE_OF) if node.op == "placeholder" else None


def mark_joined(gm: fx.GraphModule, position: int, parts: tuple[int, ...]) -> None:
    """Say that an output is the gradient of a parameter whose tiles' are at `parts`."""
    gm.meta.setdefault(_JOINED, {})[position] = parts


def joined_outputs(gm: fx.GraphModule) -> dict[int, tuple[int, ...]]:
    """Return the outputs that are one with others, by position."""
    found: dict[int, tuple[int, ...]] = gm.meta.get(_JOINED, {})
    return found


def mark_part(node: fx.Node, part: str) -> None:
    """Say which part of a value that never exists whole the node computes, for display."""
    node.meta[_PART] = part


def part_of(node: fx.Node) -> str:
    """Return which part of a value that never exists whole the node computes; empty for any other node."""
    return str(node.meta.get(_PART, ""))


def note_skipped(gm: fx.GraphModule, what: str) -> None:
    """Note what a pass might have rewritten and has not, with the reason, for display."""
    gm.meta[_LEFT_ALONE] = (*gm.meta.get(_LEFT_ALONE, ()), what)


def skipped_notes(gm: fx.GraphModule) -> tuple[str, ...]:
    """Return what passes noted by `note_skipped`."""
    return tuple(gm.meta.get(_LEFT_ALONE, ()))


def parameters(graph: fx.Graph) -> Iterator[tuple[fx.Node, ParameterSlot]]:
    """Yield the graph's parameter placeholders in order."""
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        slot = slot_of(node)
        if slot is not None:
            yield node, slot


def slot_behind(node: fx.Node) -> ParameterSlot:
    """Return the unit that a schedule operator moves, from any of them."""
    source = node
    while slot_of(source) is None:
        source = source.args[unit_position(source.target)]  # type: ignore[assignment]
    slot = slot_of(source)
    assert slot is not None
    return slot


def wire_type(node: fx.Node) -> torch.dtype:
    """Return the data type in which a schedule operator moves its unit, and holds it whole: the unit's, or what it is cast to."""
    source = node
    while source.target in (ops.wait, ops.release, ops.swap_out):
        source = source.args[0]  # type: ignore[assignment]
    dtype = source.kwargs.get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else slot_behind(node).dtype


def wire_format(node: fx.Node) -> StateFormat:
    """Return how a schedule operator's values travel."""
    return format_of(wire_type(node))


def set_wire_type(gather: fx.Node, dtype: torch.dtype) -> None:
    """Write the data type as which an all_gather moves its unit."""
    gather.kwargs = {"dtype": dtype}


def rows_bytes(node: fx.Node) -> int:
    """Return the bytes of the rows that a `gather_rows` names at most, as far as that is known before it runs."""
    indices, unit = node.args[1], slot_behind(node)
    assert isinstance(indices, fx.Node)
    return min(hinted_numel(indices.meta["val"]), unit.shape[0]) * (unit.bytes // unit.shape[0])


def wire_bytes(node: fx.Node) -> int:
    """Return the bytes of the whole unit in a schedule operator's data type."""
    return wire_format(node).bytes(slot_behind(node).numel)


def argument_of(node: fx.Node, name: str) -> object:
    """Return an argument of a schedule operator by its name; None where the operator has no such, or it wasn't given."""
    place = position_of(node.target, name)
    if place is None:
        return None
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def group_of(node: fx.Node) -> int:
    """Return the group number of a schedule operator, -1 for one that is alone."""
    group = argument_of(node, "group")
    return group if isinstance(group, int) else LONE_GROUP


def is_collective(node: fx.Node) -> bool:
    """Say whether all ranks take part in an operator, in the same order."""
    spec = SPECS.get(node.target)
    return spec is not None and spec.collective


def hop_of(node: fx.Node) -> tuple[str, str]:
    """Return the tiers between which a swap moves: (from, to)."""
    src, dst = argument_of(node, "src"), argument_of(node, "dst")
    assert isinstance(src, str)
    assert isinstance(dst, str)
    return src, dst


def start_of(gather: fx.Node) -> fx.Node:
    """Return where memory of the device is first taken for a gathered unit: its last swap_in, or the gather itself."""
    source = gather.args[0]
    return source if isinstance(source, fx.Node) and source.target is ops.swap_in else gather


def gather_started_by(node: fx.Node) -> fx.Node | None:
    """Return the gather that `start_of` leads from to this node; None where the node starts none."""
    if node.target is ops.swap_in:
        following = next(iter(node.users), None)
        return following if following is not None and following.target is ops.all_gather else None
    return node if node.target is ops.all_gather and start_of(node) is node else None


def live_bytes(node: fx.Node) -> int:
    """Return the bytes held on the device from the start of a gather to the release, given any of its operators."""
    source = node
    while source.target in (ops.wait, ops.release):
        source = source.args[0]  # type: ignore[assignment]
    return wire_bytes(start_of(source) if source.target is ops.all_gather else source)


def set_group(node: fx.Node, group: int) -> None:
    """Write the group number of a transfer that may be issued with others."""
    place = position_of(node.target, "group")
    assert place is not None, f"{node.target} is always alone"
    node.args = (*node.args[:place], group)


def policy_of(node: fx.Node) -> str:
    """Return what the partitioner is told about a node of a joint graph, such as `must_recompute`; empty for nothing."""
    policy = node.meta.get("recompute")
    return policy.name.lower() if isinstance(policy, CheckpointPolicy) else ""


def recompute(node: fx.Node) -> None:
    """Tell the partitioner to make a node again wherever it is used, and never to save it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _AFTER_ALL_CHECKPOINTS


def fake_value(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor that stands for the node's result."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node.name} is not a tensor"
    return value


def fake_mode_of(node: fx.Node) -> Any:
    """Return the mode that the fake tensors of the node's result belong to."""
    value = node.meta["val"]
    tensors = value if isinstance(value, (list, tuple)) else (value,)
    return next(tensor.fake_mode for tensor in tensors if tensor is not None)


def hinted_numel(value: object) -> int:
    """Return the elements of a traced tensor, sizes known at run time only taken as those it was traced with; else 0."""
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
    return math.prod(size or 0 for size in sizes)


def data_types(node: fx.Node) -> set[torch.dtype]:
    """Return the data types of the tensors that the node's result is or consists of."""
    value = node.meta["val"]
    return {part.dtype for part in (value if isinstance(value, (list, tuple)) else (value,))}


def set_type(node: fx.Node, dtype: torch.dtype) -> None:
    """Say that the tensors of the node's result are of another data type."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty_strided(tensor.size(), tensor.stride(), dtype=dtype)

    value = node.meta["val"]
    node.meta["val"] = changed(value) if isinstance(value, torch.Tensor) else type(value)(map(changed, value))
    node.meta.pop("tensor_meta", None)  # a second record of the same


def symbols_of(node: fx.Node) -> set[Any]:
    """Return the symbols that the node's result, a number, or the form of its result, a tensor, depends on."""
    return {symbol for expression in _expressions(node) for symbol in expression.free_symbols}


def symbols_read_off(node: fx.Node) -> set[Any]:
    """Return the symbols that are the node's result, or one of its sizes or strides, as they stand."""
    return {expression for expression in _expressions(node) if expression.is_Symbol}


def _expressions(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    numbers = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return [n.node.expr for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat)) and n.node.is_symbolic()]


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return each node's place in the order of execution."""
    return {node: index for index, node in enumerate(graph.nodes)}


def user_line(node: fx.Node) -> str:
    """Return the user's own source line that made this node, or an empty text when it isn't known."""
    lines = [line for line in (node.stack_trace or "").splitlines() if line.strip()]
    frames = [index for index, line in enumerate(lines) if line.lstrip().startswith('File "')]
    return "\n".join(lines[frames[-1] :] if frames else lines[-2:])
