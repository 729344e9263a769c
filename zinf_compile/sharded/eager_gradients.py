"""Gradients that eager code computes whole: cut on one rank, reduced on several, where each rank's is that of its own batch.

Those of the calls that this package answers are reduced in the backward of the call. A custom `autograd.Function` that is given
a parameter returns a plain tensor: a hook on each parameter that is spread over ranks reduces it before it becomes the
parameter's `grad`. Autograd adds the gradients of several uses before any hook: each operand of such a sum is reduced, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from zinf_compile._torch import runs_backward
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.runtime.lanes.lanes import Done
from zinf_compile.runtime.units.swap import offload
from zinf_compile.runtime.units.unit import Unit

from .eager_collectives import reduce_for_eager
from .gradient import ShardedGradient


def partitioned_gradient(unit: Unit, grad: torch.Tensor) -> ShardedGradient:
    """Return a gradient, given whole, partitioned like the unit: the mean over the ranks. Collective, on several ranks."""
    shard = unit.flat(grad).to(unit.reduce_dtype, copy=True)
    if unit.shard_group.size > 1:
        shard = reduce_for_eager(unit, shard)
    return gradient_of_shard(unit, shard)


def gradient_of_shard(unit: Unit, shard: torch.Tensor) -> ShardedGradient:
    """Return the gradient of which this rank has computed or cut its shard, on its way to its tier."""
    unit.context.memory.ledger.track("grads", shard)
    return ShardedGradient(unit, *offload(unit, shard, Done()))


def reduce_whole_gradients(parameter: nn.Parameter) -> None:
    """Reduce from now on what backwards compute whole of a parameter that is spread over ranks, while it is hollow."""
    if not hasattr(parameter, "_zinf_reduces"):
        learns = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen one takes no hook, and may learn later
        parameter._zinf_reduces = parameter.register_hook(partial(_reduce, weakref.ref(parameter)))  # type: ignore[attr-defined]
        parameter.requires_grad_(learns)


def stop_reducing(parameter: nn.Parameter) -> None:
    """Take the hook away from a parameter that is no longer partitioned."""
    handle = vars(parameter).pop("_zinf_reduces", None)
    if handle is not None:
        handle.remove()


def operands_of_sum(unit: Unit, args: Sequence[Any]) -> Sequence[Any]:
    """Return the operands of a sum with what is partitioned like `unit`: those that a backward computed whole, reduced."""
    if unit.shard_group.size == 1 or not any(_is_whole(item, unit) for item in args) or not runs_backward():
        return args
    parameter = unit.parameter()
    if parameter is None or not _is_hollow(parameter):
        return args
    return [partitioned_gradient(unit, item) if _is_whole(item, unit) else item for item in args]


def _reduce(of: weakref.ref[nn.Parameter], grad: torch.Tensor) -> torch.Tensor | None:
    if type(grad) is not torch.Tensor:  # partitioned, as nearly always
        return None
    parameter = of()
    if parameter is None or not _is_hollow(parameter):
        return None
    unit: Unit = vars(parameter)["_zinf_unit"]
    return _Reduced.apply(grad, unit) if _is_whole(grad, unit) else None


def _is_whole(grad: Any, unit: Unit) -> bool:
    return type(grad) is torch.Tensor and tuple(grad.shape) == unit.shape


def _is_hollow(parameter: torch.Tensor) -> bool:
    """Say whether it is hollow; inside of `gathered()` it isn't, where one rank alone may compute gradients for itself."""
    return type(parameter) is not nn.Parameter and parameter.numel() > 0


class _Reduced(torch.autograd.Function):
    """The reduction of a gradient, which can't be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, unit: Unit) -> ShardedGradient:
        ctx.name = unit.name
        return partitioned_gradient(unit, grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise UnsupportedModelError(
            f"double backward: something differentiates the gradient of {ctx.name}, which eager code computed with create_graph="
            "True and which is averaged over the ranks. Omit create_graph, or approximate by finite differences of first "
            "gradients"
        )
