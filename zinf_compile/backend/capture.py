"""Reads a Dynamo graph's inputs: slots for parameters, names for buffers, errors for models that can't be partitioned.

Called by `graph_compiler`; moves no values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import fx, nn

from zinf_compile._torch import (
    DATA_ASSIGNMENTS,
    aot_index,
    captured_name,
    gradient_outputs,
    is_buffer,
    mutated_inputs,
    no_torch_function,
)
from zinf_compile.config import Config
from zinf_compile.errors import UnsupportedModelError, ZinfError
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Placement
from zinf_compile.ir.tiling import cut_parameter
from zinf_compile.passes.graph.node_facts import mark_buffer, mark_name, mark_slot, user_line
from zinf_compile.runtime.comm.shard_group import ShardGroup
from zinf_compile.runtime.comm.shard_ranges import shard_numel
from zinf_compile.runtime.system.accelerator import converting_methods
from zinf_compile.sharded.eligibility import problem_of, reject_unsupported
from zinf_compile.sharded.parameter import unit_of

from .wrappers import reject_wrappers

_log = logging.getLogger("zinf_compile")


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    """The inputs of one captured graph that belong to modules, by position."""

    slots: Mapping[int, ParameterSlot]
    buffers: Mapping[int, str]
    names: Mapping[int, str]
    """The user's name for each input."""
    device: torch.device


def read_inputs(gm: fx.GraphModule, inputs: Sequence[object], *, partitions: bool) -> Captured:
    """Describe the graph's inputs; raise `UnsupportedModelError` for what can't be compiled, or partitioned if it is to be."""
    if partitions:
        reject_wrappers()
    captured = _read_to_partition(gm, inputs) if partitions else _read_ordinary(gm, inputs)
    _reject_assignments(gm, captured, partitions=partitions)
    return captured


def _read_to_partition(gm: fx.GraphModule, inputs: Sequence[object]) -> Captured:
    attached = [name for name, _ in gm.named_parameters()]
    if attached:
        raise UnsupportedModelError(
            f"Dynamo attached parameter {attached[0]} to the graph instead of passing it as an input, and what a graph holds "
            "can't be partitioned. Set torch._dynamo.config.inline_inbuilt_nn_modules = True and, for evaluations, "
            "torch._inductor.config.freezing = False (TORCHINDUCTOR_FREEZING=0): their defaults"
        )
    names = _names(gm)
    slots: dict[int, ParameterSlot] = {}
    for index, value in enumerate(inputs):
        if isinstance(value, nn.Parameter):
            slots[index] = ParameterSlot.of(value, names[index], index=index)
            reject_unsupported(value, slots[index])
    devices = {slot.device: slot for slot in slots.values()}
    if len(devices) > 1:
        first, second = list(devices.values())[:2]
        raise UnsupportedModelError(
            f"parameters {first.name} and {second.name} are on different devices, {first.device} and {second.device}; a rank "
            "partitions the parameters of one device: move the model with model.to(device) before its first compiled call"
        )
    device = next(iter(devices), torch.device("cpu"))
    foreign = [
        (name, value.device)
        for name, value in zip(names.values(), inputs, strict=True)
        if slots and isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != device
    ]
    if foreign:
        raise UnsupportedModelError(
            f"input {foreign[0][0]} is on {foreign[0][1]}, the parameters are on {device}; move both to one device"
        )
    return Captured(slots, _buffers(gm, inputs), names, device)


def _read_ordinary(gm: fx.GraphModule, inputs: Sequence[object]) -> Captured:
    """Leave out the parameters that couldn't be partitioned, of which nothing needs a slot."""
    names = _names(gm)
    parameters = {index: value for index, value in enumerate(inputs) if isinstance(value, nn.Parameter)}
    described = {index: ParameterSlot.of(value, names[index], index=index) for index, value in parameters.items()}
    slots = {index: slot for index, slot in described.items() if problem_of(parameters[index], slot) is None}
    device = next((slot.device for slot in (slots or described).values()), torch.device("cpu"))
    slots = {index: slot for index, slot in slots.items() if slot.device == device}
    return Captured(slots, _buffers(gm, inputs), names, device)


def _names(gm: fx.GraphModule) -> dict[int, str]:
    """Return the user's name for each input."""
    placeholders = (node for node in gm.graph.nodes if node.op == "placeholder")
    return {index: captured_name(node) for index, node in enumerate(placeholders)}


def _buffers(gm: fx.GraphModule, inputs: Sequence[object]) -> dict[int, str]:
    """Return the names of the inputs that are buffers."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return {
        index: captured_name(node)
        for index, (node, value) in enumerate(zip(placeholders, inputs, strict=True))
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and is_buffer(node)
    }


def cut_into_tiles(
    captured: Captured, inputs: Sequence[object], placement: Placement, group: ShardGroup, *, from_placement: bool = False
) -> Captured:
    """Add to each slot its tiles, and the data type in which and when its gradient is reduced.

    All come from the unit of a partitioned parameter, else from `placement` and `group`; with `from_placement` always from
    `placement` and, of a partitioned parameter, its unit's group.
    """
    slots = {}
    for index, slot in captured.slots.items():
        unit, parameter = unit_of(inputs[index]), inputs[index]
        assert isinstance(parameter, torch.Tensor)
        if unit is None or from_placement:
            with no_torch_function():
                size = (group if unit is None else unit.shard_group).size
                tiles = cut_parameter(parameter, slot.name, placement.tile, size)
            own = placement.of_parameter(dim=len(slot.shape), numel=slot.numel)
            reduced_in = own.reduce_dtype_of(slot.dtype)
        else:
            own, size, tiles, reduced_in = unit.placement, unit.shard_group.size, unit.boxes, unit.reduce_dtype
        slots[index] = dataclasses.replace(
            slot,
            tiles=tiles,
            reduced_in=reduced_in if reduced_in != slot.dtype else None,
            reduced_at_step=own.reduces_at_step(slot.numel, shard_numel(slot.numel, size), tiled=bool(tiles)),
        )
    return dataclasses.replace(captured, slots=slots)


def mark_inputs(gm: fx.GraphModule, captured: Captured, *, partitions: bool) -> None:
    """Write slots and buffers onto the placeholders of a joint or inference graph that AOTAutograd made.

    Raises `UnsupportedModelError`, with the user's line, where parameters are partitioned and the graph writes to one, or makes a
    sparse gradient.
    """
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            break
        index = aot_index(node)
        if index is None:
            continue
        mark_name(node, captured.names[index])
        if index in captured.slots:
            mark_slot(node, captured.slots[index])
        elif index in captured.buffers:
            mark_buffer(node, captured.buffers[index])
    if partitions:
        _reject_mutations(gm, captured)
        _reject_sparse_gradients(gm, captured)


def _reject_assignments(gm: fx.GraphModule, captured: Captured, *, partitions: bool) -> None:
    """Raise `UnsupportedModelError`, with the user's line, where a captured graph runs `tensor.data = value`.

    Assigning a parameter to itself is dropped: a forward that calls `module.to(...)` does so if no conversion is needed.
    `partitions`: parameters with slots are partitioned, and no other writes to them work, either.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    names = {placeholders[index]: name for index, name in captured.names.items()}
    slots = {placeholders[index]: slot for index, slot in captured.slots.items()}
    for node in list(gm.graph.nodes):
        if node.target in DATA_ASSIGNMENTS and node.args[0] in names:
            slot = slots.get(node.args[0])
            if not _assigns_itself(node):
                raise _mutation(slot, node) if slot is not None and partitions else _assignment(names[node.args[0]], node)
            for bookkeeping in [*node.users, node]:  # Dynamo compensates for the version that set_ increments
                gm.graph.erase_node(bookkeeping)
    gm.recompile()


def _assigns_itself(assignment: fx.Node) -> bool:
    """Return whether the value is the parameter in its own type and on its own device: `parameter.data = parameter.to(...)`."""
    parameter, value = assignment.args[:2]
    if not isinstance(value, fx.Node) or value.target not in converting_methods() or value.args[0] is not parameter:
        return False
    before, found = value.args[0].meta["example_value"], value.meta["example_value"]  # type: ignore[union-attr]
    unchanged = (found.dtype, found.device, found.layout) == (before.dtype, before.device, before.layout)
    if unchanged and found.layout == torch.strided:
        unchanged = found.stride() == before.stride()
    return unchanged and not any(user.users or user.op == "output" for user in assignment.users)


@contextlib.contextmanager
def explaining_empty_inputs(captured: Captured, inputs: Sequence[object]) -> Iterator[None]:
    """Context for tracing: if it fails and an input has no elements, raise an `UnsupportedModelError` that names the input."""
    try:
        yield
    except ZinfError:
        raise
    except Exception as error:
        for index, value in enumerate(inputs):
            if index not in captured.slots and isinstance(value, torch.Tensor) and 0 in value.shape:
                raise UnsupportedModelError(
                    f"PyTorch can't trace the model for input {captured.names[index]}, shape {list(value.shape)}, which has no "
                    f"elements ({type(error).__name__}: {error}); skip empty batches"
                ) from error
        raise


def _reject_mutations(gm: fx.GraphModule, captured: Captured) -> None:
    """Raise `UnsupportedModelError`, with the user's line, where the graph writes to a parameter."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    results = output.args[0]
    for position, index in mutated_inputs(output).items():
        slot = captured.slots.get(index)
        if slot is not None:
            raise _mutation(slot, results[position])


def _reject_sparse_gradients(joint: fx.GraphModule, captured: Captured) -> None:
    """Raise `UnsupportedModelError`, with the user's line, where a parameter gets a sparse gradient."""
    output = next(node for node in reversed(joint.graph.nodes) if node.op == "output")
    results = output.args[0]
    for position, index in gradient_outputs(output).items():
        slot, grad = captured.slots.get(index), results[position]
        value = grad.meta.get("val") if isinstance(grad, fx.Node) else None
        if slot is not None and isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise UnsupportedModelError(
                f"the gradient of parameter {slot.name} is sparse ({value.layout}); accepted: dense gradients. Build the layer "
                f"with sparse=False (Embedding, EmbeddingBag){_at(grad)}"
            )


def _mutation(slot: ParameterSlot, culprit: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model changes parameter {slot.name} in its forward, where it is partitioned (Embedding(max_norm=...), weight "
        "clipping, a moving average of weights). Change parameters between steps, inside "
        f"`with zinf_compile.gathered(model, write=True):`{_at(culprit)}"
    )


def _assignment(name: str, culprit: fx.Node) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model assigns to the data of {name} in its forward; accepted: in-place writes ({name}.data.copy_(value)), and "
        f"assignments between its calls{_at(culprit)}"
    )


def _at(culprit: object) -> str:
    line = user_line(culprit) if isinstance(culprit, fx.Node) else ""
    return f"\n{line}" if line else ""


def tell_of_tiles(asked: Config, taken: Config, number: int) -> None:
    """Log that graph `number` works within the cap with smaller tiles than those that follow from it."""
    _log.info(
        "graph %d, and steps of an optimizer like Adam, don't fit %s bytes of device_memory with default tiles of %s: it has "
        "tiles of %s (option tile), and pieces of %s elements",
        number,
        f"{asked.device_bytes:,}",
        f"{asked.tile_bytes:,}",
        f"{taken.tile_bytes:,}",
        f"{taken.shape().piece_numel:,}",
    )


def log_tiles(slots: Iterable[ParameterSlot], number: int) -> None:
    """Log which parameters of graph `number` move in tiles."""
    cut = [slot for slot in slots if slot.tiles]
    if cut:
        # a parameter's first tile is its largest
        listed = ", ".join(f"{slot.name} in {len(slot.tiles)} of up to {slot.cut(0).bytes:,} bytes" for slot in cut)
        _log.info("graph %d moves parameters in tiles (option tile): %s", number, listed)
