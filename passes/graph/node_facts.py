"""Typed accessors of nodes. Every pass reads metadata through them; keys of `node.meta` are known here alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zinf_compile._torch import prettified
from zinf_compile.ir import ops
from zinf_compile.ir.formats import StateFormat, format_of
from zinf_compile.ir.op_spec import LONE_GROUP, SPECS, moves_values, position_of, unit_position
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.saved_memory import SavedMemory

_SLOT = "zinf_slot"
_BUFFER = "zinf_buffer"
_NAME = "zinf_name"
_REGION = "zinf_region"
_TILE_OF = "zinf_tile_of"
_JOINED = "zinf_joined"

_AFTER_ALL_CHECKPOINTS = sys.maxsize
"""Larger than any checkpoint's number, so that a view shared with a later checkpointed region is recomputed too."""
_PART = "zinf_part"
_SKIPPED = "zinf_skipped"
_KEPT = "zinf_kept"
_LEAVING, _RETURNING = "zinf_leaving", "zinf_returning"


def mark_slot(node: fx.Node, slot: ParameterSlot) -> None:
    """Mark placeholder `node` as a parameter."""
    node.meta[_SLOT] = slot


def slot_of(node: fx.Node) -> ParameterSlot | None:
    """Return the slot of a parameter's placeholder, None for any other node."""
    slot = node.meta.get(_SLOT)
    return slot if isinstance(slot, ParameterSlot) and node.op == "placeholder" else None


def mark_buffer(node: fx.Node, name: str) -> None:
    """Mark placeholder `node` as a module's buffer."""
    node.meta[_BUFFER] = name


def buffer_of(node: fx.Node) -> str | None:
    """Return the name of a buffer's placeholder, None for any other node."""
    return node.meta.get(_BUFFER) if node.op == "placeholder" else None


def mark_name(node: fx.Node, name: str) -> None:
    """Record the user's name of an input, for display."""
    node.meta[_NAME] = name


def display_name(node: fx.Node) -> str:
    """Return the name to show for a node: the user's for parameters and inputs, the graph's for the rest."""
    slot = slot_of(node)
    return slot.name if slot is not None else str((node.op == "placeholder" and node.meta.get(_NAME)) or node.name)


def module_of(node: fx.Node) -> str:
    """Return the name of the module that the operator, or the forward of a gradient, comes from; empty where unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return prettified(str(next(reversed(stack.values()))[0])) if stack else ""


def mark_region(node: fx.Node) -> None:
    """Mark the operator as a region's first, even without a transfer before it."""
    node.meta[_REGION] = True


def starts_region(node: fx.Node) -> bool:
    """Return whether the operator is marked as a region's first."""
    return bool(node.meta.get(_REGION))


def unmark_region(node: fx.Node) -> None:
    """Remove the mark of a region's first operator."""
    node.meta.pop(_REGION, None)


def move_region_mark(node: fx.Node, to: fx.Node) -> None:
    """Move the mark of a region's first operator, where `node` has it."""
    if starts_region(node):
        unmark_region(node)
        mark_region(to)


def mark_kept(node: fx.Node, unit: fx.Node) -> None:
    """Mark a placeholder of a backward as the full value of the parameter at placeholder `unit`, which the forward has kept."""
    node.meta[_KEPT] = unit.name


def kept_units(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the placeholders that are full values of parameters, by the names of these."""
    return {node.meta[_KEPT]: node for node in graph.nodes if node.op == "placeholder" and _KEPT in node.meta}


def leave_whole(gm: fx.GraphModule, slot: ParameterSlot, reason: str) -> None:
    """Note the reason why a tiled parameter is gathered, or its gradient computed, as a whole."""
    what = f"tiles of {slot.name}: {reason}"
    if what not in skipped_notes(gm):
        note_skipped(gm, what)


def mark_tile(node: fx.Node, unit: fx.Node, slot: ParameterSlot) -> None:
    """Mark placeholder `node` as a tile of parameter `unit`."""
    node.meta[_SLOT] = slot
    node.meta[_TILE_OF] = unit.name


def tile_of(node: fx.Node) -> str | None:
    """Return the name of the placeholder whose tile `node` is, None for any other node."""
    return node.meta.get(_TILE_OF) if node.op == "placeholder" else None


def mark_joined(gm: fx.GraphModule, position: int, parts: tuple[int, ...]) -> None:
    """Record that the output at `position` is a gradient in tiles, whose outputs are at `parts`."""
    gm.meta.setdefault(_JOINED, {})[position] = parts


def joined_outputs(gm: fx.GraphModule) -> dict[int, tuple[int, ...]]:
    """Return the outputs that are gradients in tiles: by position, the positions of the tiles."""
    found: dict[int, tuple[int, ...]] = gm.meta.get(_JOINED, {})
    return found


def mark_part(node: fx.Node, part: str) -> None:
    """Record which part of a value the node computes, for display; such a value never exists as a whole."""
    node.meta[_PART] = part


def part_of(node: fx.Node) -> str:
    """Return the text of `mark_part`; empty for any other node."""
    return str(node.meta.get(_PART, ""))


def note_skipped(gm: fx.GraphModule, what: str) -> None:
    """Record a rewrite that a pass skipped, with the reason, for display."""
    gm.meta[_SKIPPED] = (*gm.meta.get(_SKIPPED, ()), what)


def skipped_notes(gm: fx.GraphModule) -> tuple[str, ...]:
    """Return the texts of `note_skipped`, in order."""
    return tuple(gm.meta.get(_SKIPPED, ()))


def pass_notes(source: fx.GraphModule, to: fx.GraphModule) -> None:
    """Let a graph that was cut from another one have its texts, each once."""
    for what in skipped_notes(source):
        if what not in skipped_notes(to):
            note_skipped(to, what)


def mark_moving(forward: fx.GraphModule, backward: fx.GraphModule, moving: tuple[SavedMemory, ...]) -> None:
    """Record in both graphs of a pair which saved memory leaves the device between them."""
    forward.meta[_LEAVING] = backward.meta[_RETURNING] = moving


def leaving(gm: fx.GraphModule) -> tuple[SavedMemory, ...]:
    """Return the saved memory that leaves the device in a forward."""
    return tuple(gm.meta.get(_LEAVING, ()))


def returning(gm: fx.GraphModule) -> tuple[SavedMemory, ...]:
    """Return the saved memory that comes back to the device in a backward."""
    return tuple(gm.meta.get(_RETURNING, ()))


def parameters(graph: fx.Graph) -> Iterator[tuple[fx.Node, ParameterSlot]]:
    """Yield the graph's parameter placeholders in order."""
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        slot = slot_of(node)
        if slot is not None:
            yield node, slot


def slot_behind(node: fx.Node) -> ParameterSlot:
    """Return the slot of the unit that a schedule operator moves."""
    source = node
    while slot_of(source) is None:
        source = source.args[unit_position(source.target)]  # type: ignore[assignment]
    slot = slot_of(source)
    assert slot is not None
    return slot


def values_behind(node: fx.Node) -> list[fx.Node]:
    """Return the saved values that an operator is about; empty for one that moves a unit, and for compute."""
    if position_of(node.target, "value") is not None:
        return list(node.all_input_nodes)
    if not moves_values(node.target):
        return []
    values: object = node.args[0]
    while isinstance(values, fx.Node):
        values = values.args[0]
    assert isinstance(values, (list, tuple)), "the first hop is of values"
    return [value for value in values if isinstance(value, fx.Node)]


def wire_type(node: fx.Node) -> torch.dtype:
    """Return the data type of a schedule operator's values: the unit's own, or the one it is cast to for the transfer."""
    source = node
    while source.target in (ops.wait, ops.release, ops.swap_out, ops.keep_for_backward):
        source = source.args[0]  # type: ignore[assignment]
    dtype = source.kwargs.get("dtype")
    return dtype if isinstance(dtype, torch.dtype) else slot_behind(node).dtype


def wire_format(node: fx.Node) -> StateFormat:
    """Return the format of a schedule operator's values."""
    return format_of(wire_type(node))


def set_wire_type(gather: fx.Node, dtype: torch.dtype) -> None:
    """Set the data type in which an all_gather moves its unit."""
    gather.kwargs = {"dtype": dtype}


def rows_bytes(node: fx.Node) -> int:
    """Return the upper bound of bytes that a `gather_rows` moves, from the traced number of indices."""
    indices, unit = node.args[1], slot_behind(node)
    assert isinstance(indices, fx.Node)
    return min(hinted_numel(indices.meta["val"]), unit.shape[0]) * (unit.bytes // unit.shape[0])


def wire_bytes(node: fx.Node) -> int:
    """Return the bytes of the whole unit in a schedule operator's data type."""
    return wire_format(node).bytes(slot_behind(node).numel)


def argument_of(node: fx.Node, name: str) -> object:
    """Return an argument of a schedule operator by name; None where the operator lacks it or it isn't given."""
    place = position_of(node.target, name)
    if place is None:
        return None
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def group_of(node: fx.Node) -> int:
    """Return the group number of a schedule operator, -1 for one without a group."""
    group = argument_of(node, "group")
    return group if isinstance(group, int) else LONE_GROUP


def is_collective(node: fx.Node) -> bool:
    """Return whether the operator is a collective: all ranks take part in it, in the same order."""
    spec = SPECS.get(node.target)
    return spec is not None and spec.collective and not reduced_at_step(node)


def reduced_at_step(node: fx.Node) -> bool:
    """Return whether the operator keeps a full gradient, whose reduction is the step's."""
    return argument_of(node, "at_step") is True


def hop_of(node: fx.Node) -> tuple[str, str]:
    """Return the tiers between which a swap moves: (from, to)."""
    src, dst = argument_of(node, "src"), argument_of(node, "dst")
    assert isinstance(src, str)
    assert isinstance(dst, str)
    return src, dst


def start_of(gather: fx.Node) -> fx.Node:
    """Return the operator that allocates device memory for a gathered unit: its last swap_in, or the gather itself."""
    source = gather.args[0]
    return source if isinstance(source, fx.Node) and source.target is ops.swap_in else gather


def gather_started_by(node: fx.Node) -> fx.Node | None:
    """Return the gather whose `start_of` is this node, None if there is none."""
    if node.target is ops.swap_in:
        following = next(iter(node.users), None)
        return following if following is not None and following.target is ops.all_gather else None
    return node if node.target is ops.all_gather and start_of(node) is node else None


def live_bytes(node: fx.Node) -> int:
    """Return the device bytes of a unit from the start of its gather to its release, given any of its operators."""
    source = node
    while source.target in (ops.wait, ops.release):
        source = source.args[0]  # type: ignore[assignment]
    return wire_bytes(start_of(source) if source.target is ops.all_gather else source)


Counts = Callable[[fx.Node], bool]
"""Says of a gather, or another operator of its unit, whether it takes memory: where the shard itself is read, it takes none."""


def counts_all(node: fx.Node) -> bool:
    """Let each gather count."""
    return True


def set_group(node: fx.Node, group: int) -> None:
    """Set the group number of a transfer. Transfers of one group are issued together."""
    place = position_of(node.target, "group")
    assert place is not None, f"{node.target} has no group"
    node.args = (*node.args[:place], group)


def policy_of(node: fx.Node) -> str:
    """Return the checkpoint policy of a node, such as `must_recompute`; empty where it has none."""
    policy = node.meta.get("recompute")
    return policy.name.lower() if isinstance(policy, CheckpointPolicy) else ""


def recompute(node: fx.Node) -> None:
    """Make the partitioner recompute a node in the backward, never save it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _AFTER_ALL_CHECKPOINTS


def fake_value(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of the node's result."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node.name} is not a tensor"
    return value


def fake_mode_of(node: fx.Node) -> Any:
    """Return the mode that the fake tensors of the node's result belong to."""
    value = node.meta["val"]
    tensors = value if isinstance(value, (list, tuple)) else (value,)
    return next(tensor.fake_mode for tensor in tensors if tensor is not None)


def hinted_numel(value: object) -> int:
    """Return the number of elements of a traced tensor, with dynamic sizes as traced; 0 for other values."""
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
    return math.prod(size or 0 for size in sizes)


def data_types(node: fx.Node) -> set[torch.dtype]:
    """Return the data types of the tensors in the node's result."""
    value = node.meta["val"]
    return {part.dtype for part in (value if isinstance(value, (list, tuple)) else (value,))}


def set_type(node: fx.Node, dtype: torch.dtype) -> None:
    """Change the data type of the node's fake values."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty_strided(tensor.size(), tensor.stride(), dtype=dtype)

    value = node.meta["val"]
    node.meta["val"] = changed(value) if isinstance(value, torch.Tensor) else type(value)(map(changed, value))
    node.meta.pop("tensor_meta", None)  # PyTorch's second record of shape and type


def symbols_of(node: fx.Node) -> set[Any]:
    """Return the symbols in the node's result: in a number itself, in the sizes and strides of a tensor."""
    return {symbol for expression in _expressions(node) for symbol in expression.free_symbols}


def symbols_read_off(node: fx.Node) -> set[Any]:
    """Return those of `symbols_of` that can be read directly: the result, or one of its sizes or strides, is the symbol."""
    return {expression for expression in _expressions(node) if expression.is_Symbol}


def _expressions(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    numbers = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return [n.node.expr for n in numbers if isinstance(n, (torch.SymInt, torch.SymFloat)) and n.node.is_symbolic()]


def is_backward(node: fx.Node) -> bool:
    """Return whether a node of a joint graph belongs to the backward."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return each node's index in the order of execution."""
    return {node: index for index, node in enumerate(graph.nodes)}


def user_line(node: fx.Node) -> str:
    """Return the user's source line that this node comes from, with its file; empty where unknown."""
    lines = [line for line in (node.stack_trace or "").splitlines() if line.strip()]
    frames = [index for index, line in enumerate(lines) if line.lstrip().startswith('File "')]
    return "\n".join(lines[frames[-1] :] if frames else lines[-2:])
