"""Gradients that are accumulated and not yet applied, in a checkpoint: saved from their tier, restored to it, piece by piece.

Called by `save` and `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from zinf_compile._torch import no_torch_function
from zinf_compile.errors import CheckpointError
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.tiers import Tier
from zinf_compile.optim.step_gradient import is_applied
from zinf_compile.runtime.lanes.lanes import Done
from zinf_compile.runtime.units.backing import HostBacking
from zinf_compile.runtime.units.offloaded_gradient import OffloadedGradient, offloaded_to_drive
from zinf_compile.runtime.units.shard_values import DeviceShard, OffloadedGradientShard, pieces_of
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.earlier_gradients import note_equal
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.operands import gradient_values
from zinf_compile.sharded.parameter import ShardedParameter

from .fill_shards import ShardToFill, fill_shards
from .rank_contents import RankContents, Values
from .shard_reader import ShardReader

if TYPE_CHECKING:
    from .checkpoint_files import CheckpointFiles


def add_gradients(contents: RankContents, names: Mapping[str, torch.Tensor]) -> None:
    """Add the gradients of parameters by name, in the type in which they are kept, but those that a step has applied."""
    done: set[int] = set()
    for name, parameter in names.items():
        with no_torch_function():
            grad = parameter.grad if parameter.is_leaf else None
        if grad is None or id(parameter) in done or is_applied(grad):
            continue
        done.add(id(parameter))
        key = f"gradient.{name}"
        if isinstance(grad, ShardedGradient):
            contents.add_shard(key, grad.unit, parameter, grad.kept_dtype, partial(_pieces, key, grad))
        elif grad.layout == torch.strided:
            contents.add_whole(key, grad)
        else:
            raise CheckpointError(
                f"the gradient of {name} has the layout {grad.layout}; accepted: dense gradients. Take the step, then "
                "optimizer.zero_grad(), before saving"
            )


def _pieces(key: str, grad: ShardedGradient) -> Values:
    values = gradient_values(grad)
    for start, end in pieces_of(grad.unit):
        yield key, start, values.fetch(start, end)()


def check_gradients(files: CheckpointFiles, names: Mapping[str, torch.Tensor]) -> None:
    """Raise `CheckpointError` naming saved gradients that are of no parameter here, or of another shape."""
    shapes = {key: tuple(tensor.shape) for key, tensor in _by_key(files, names).items()}
    problems = [
        f"{key}, {list(saved.shape)}"
        for key, saved in files.tensors.items()
        if key.startswith("gradient.") and shapes.get(key) != saved.shape
    ]
    if problems:
        raise CheckpointError(
            f"{files.folder} has gradients of which the model has no parameter of that shape: {'; '.join(problems)}; nothing was "
            "changed"
        )


def whole_gradients(files: CheckpointFiles, names: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the keys of saved gradients of parameters that are whole on each rank."""
    whole = [key for key, tensor in _by_key(files, names).items() if not isinstance(tensor, ShardedParameter)]
    return [key for key in whole if key in files.tensors]


def load_gradients(files: CheckpointFiles, names: Mapping[str, torch.Tensor]) -> None:
    """Replace the gradients of parameters by name: by those of a checkpoint, by none where it has none."""
    done: set[int] = set()
    for key, parameter in _by_key(files, names).items():
        if id(parameter) in done or not isinstance(parameter, torch.nn.Parameter):
            continue
        done.add(id(parameter))
        with no_torch_function():
            parameter.grad = None
            if key not in files.tensors:
                continue
            if isinstance(parameter, ShardedParameter):
                unit = parameter._zinf_unit
                parameter.grad = _restored(unit, ShardReader(files, key, unit))
            else:
                whole = torch.empty_like(parameter).copy_(files.whole(key))  # with the strides that autograd expects
                note_equal(whole)
                parameter.grad = whole


def _by_key(files: CheckpointFiles, names: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what may have a gradient by the key that this has in a checkpoint; tied ones by one key or by each of theirs."""
    aliases = files.settings.get("aliases", {})
    return {f"gradient.{aliases.get(name, name)}": tensor for name, tensor in names.items()}


def _restored(unit: Unit, reader: ShardReader) -> ShardedGradient:
    """Return a gradient on its tier, in the type in which its unit keeps it; one piece more is in memory."""
    dtype, context = unit.reduce_dtype, unit.context
    hops = context.link.topology.hops(unit.placement.grads)
    offloaded: OffloadedGradient | None = None
    if unit.gradient_pool is not None:
        unit.wait_updated()  # its last gradient may still be in the place of this one
        offloaded = offloaded_to_drive(unit, *unit.gradient_pool, unit.shard_numel, dtype)
    elif hops and unit.placement.grads == Tier.HOST:
        context.memory.make_room(context.memory.host_ledger, format_of(dtype).bytes(unit.shard_numel))
        host = context.link.host_buffer(unit.shard_numel, dtype)
        context.memory.host_ledger.track("grads", host)
        offloaded = OffloadedGradient(unit, HostBacking(host), unit.shard_numel, dtype)
    if offloaded is not None:
        fill_shards([ShardToFill(reader, unit, dtype, OffloadedGradientShard(unit, offloaded).write)])
        return ShardedGradient(unit, offloaded, Done())
    shard = torch.zeros(unit.shard_numel, dtype=dtype, device=unit.device)
    context.memory.ledger.track("grads", shard)
    fill_shards([ShardToFill(reader, unit, dtype, DeviceShard(unit, shard).write, shard)])
    return ShardedGradient(unit, shard, Done())
