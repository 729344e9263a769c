"""Gradients that are accumulated and not yet applied, in a checkpoint: saved from their tier, restored to it, piece by piece.

Called by `save` and `load`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from zinf_compile._torch import no_torch_function
from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.lanes.lanes import Done
from zinf_compile.runtime.units.offloaded_gradient import offloaded_to_drive
from zinf_compile.runtime.units.shard_values import OffloadedGradientShard, pieces_of
from zinf_compile.runtime.units.swap import offload
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.operands import gradient_values
from zinf_compile.sharded.parameter import ShardedParameter

from .rank_contents import RankContents, Values
from .shard_reader import ShardReader

if TYPE_CHECKING:
    from .saved_files import SavedFiles

Read = Callable[[int, int], torch.Tensor]
"""Returns elements [start, end) of this rank's shard, flat, on the host."""


def add_gradients(contents: RankContents, names: Mapping[str, torch.Tensor]) -> None:
    """Add the gradients of parameters by name, in the type in which they are kept."""
    done: set[int] = set()
    for name, parameter in names.items():
        with no_torch_function():
            grad = parameter.grad if parameter.is_leaf else None
        if grad is None or id(parameter) in done:
            continue
        done.add(id(parameter))
        key = f"gradient.{name}"
        if isinstance(grad, ShardedGradient):
            contents.add_shard(key, grad.unit, parameter, grad.kept_dtype, lambda key=key, grad=grad: _pieces(key, grad))  # type: ignore[misc]
        elif grad.layout == torch.strided:
            contents.add_whole(key, grad)
        else:
            raise CheckpointError(
                f"the gradient of {name} has the layout {grad.layout}; accepted: dense gradients. Take the step first"
            )


def _pieces(key: str, grad: ShardedGradient) -> Values:
    values = gradient_values(grad)
    for start, end in pieces_of(grad.unit):
        yield key, start, values.fetch(start, end)()


def load_gradients(files: SavedFiles, names: Mapping[str, torch.Tensor]) -> None:
    """Replace the gradients of parameters by name: by those of a checkpoint, by none where it has none."""
    aliases, done = files.settings.get("aliases", {}), set[int]()
    for name, parameter in names.items():
        if id(parameter) in done or not isinstance(parameter, torch.nn.Parameter):
            continue
        done.add(id(parameter))
        key = f"gradient.{aliases.get(name, name)}"
        with no_torch_function():
            parameter.grad = None
            if key not in files.tensors:
                continue
            if isinstance(parameter, ShardedParameter):
                unit = parameter._zinf_unit
                parameter.grad = _restored(unit, files.tensors[key].dtype, ShardReader(files, key, unit).read)
            else:
                parameter.grad = files.whole(key).to(parameter.device, parameter.dtype)


def _restored(unit: Unit, dtype: torch.dtype, read: Read) -> ShardedGradient:
    if unit.gradient_pool is not None and dtype == unit.reduce_dtype:  # straight to its drive
        offloaded = offloaded_to_drive(unit, *unit.gradient_pool, unit.shard_numel, dtype)
        target = OffloadedGradientShard(unit, offloaded)
        for start, end in pieces_of(unit):
            target.write(start, read(start, end)).wait()
        return ShardedGradient(unit, offloaded, Done())
    shard = torch.zeros(unit.shard_numel, dtype=dtype, device=unit.device)
    unit.context.memory.ledger.track("grads", shard)
    for start, end in pieces_of(unit):
        shard[start:end].copy_(read(start, end))
    if dtype != unit.reduce_dtype:  # its place on another tier is made for that type
        return ShardedGradient(unit, shard, Done())
    return ShardedGradient(unit, *offload(unit, shard, Done()))
