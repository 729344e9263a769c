"""Whole values that autograd still needs after a parameter was partitioned.

In a model's first forward, eager code between graphs may use a parameter that a later graph of the same forward partitions.
What autograd saved of it, the parameter itself or a view, is read from the parameter's memory when the backward comes, so that
memory stays until nothing else holds it. Nothing can change it meanwhile: a change raises the parameter's version, and the
backward is refused, as in eager PyTorch.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from zinf_compile._torch import hooks_may_keep_tensors, no_torch_function, storage_owners, tensor_owners
from zinf_compile.runtime.system.process_wide import process_wide

_held: dict[int, _Held] = process_wide({})
"""Partitioned parameters whose memory is whole for now, by id."""

_usual: dict[tuple[bool, bool], int] = process_wide({})
"""Uses of a parameter that nothing has saved, by whether it requires a gradient, and whether an `autograd.Function` that was
called with it runs."""


class _Held(NamedTuple):
    parameter: weakref.ref[nn.Parameter]
    version: int
    by_hooks: bool
    """Hooks for saved tensors may refer to it."""


def in_use(parameters: Iterable[nn.Parameter], *, called: bool) -> set[int]:
    """Return the ids of whole parameters whose memory something besides the parameter itself may read.

    That is a view or an alias of it, or a graph of autograd that has saved it. `called`: a compiled graph has been called with
    them, perhaps below autograd, which counts as a use each time. Below hooks for saved tensors any may be in use: what they keep
    are references in Python, which tell nothing.
    """
    found = list(parameters)
    if hooks_may_keep_tensors():
        return {id(parameter) for parameter in found}
    with no_torch_function():
        uses = [_uses(parameter) for parameter in found]
        below = called and all(count > _usual_uses(p, below_apply=False) for p, count in zip(found, uses, strict=True))
        return {
            id(parameter)
            for parameter, count in zip(found, uses, strict=True)
            if storage_owners(parameter) > 1 or count > _usual_uses(parameter, below_apply=below)
        }


def hold(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Give a parameter that was just made hollow its whole values back, for as long as something reads them."""
    with torch.no_grad(), no_torch_function():
        parameter.data = whole
        _held[id(parameter)] = _Held(weakref.ref(parameter), parameter._version, hooks_may_keep_tensors())


def no_longer_in_use(*, stepped: bool) -> list[nn.Parameter]:
    """Forget, and return, the parameters whose memory nothing reads any more, or nothing may read: their values changed.

    `stepped`: behind a step of an optimizer, which is taken for the end of what hooks for saved tensors keep.
    """
    if not _held:
        return []
    alive = {key: parameter for key, held in _held.items() if (parameter := held.parameter()) is not None}
    with no_torch_function(), torch.inference_mode(False):
        sharing = collections.Counter(parameter.untyped_storage()._cdata for parameter in alive.values())
        over = {
            key: parameter
            for key, parameter in alive.items()
            if parameter._version != _held[key].version
            or (
                (stepped or not _held[key].by_hooks)
                and storage_owners(parameter) <= sharing[parameter.untyped_storage()._cdata]
                and _uses(parameter) <= _usual_uses(parameter, below_apply=False)
            )
        }
    for key in [key for key in _held if key not in alive or key in over]:
        del _held[key]
    return list(over.values())


def forget(parameter: nn.Parameter) -> None:
    """Forget a parameter whose memory is about to be replaced."""
    _held.pop(id(parameter), None)


def _uses(parameter: torch.Tensor) -> int:
    """Return the uses of a tensor in C++, but for the node that accumulates its gradient, which saves no value."""
    uses = tensor_owners(parameter)
    if parameter.requires_grad:
        edge = torch.autograd.graph.get_gradient_edge(parameter)  # makes such a node if there is none, for as long as it lives
        uses = tensor_owners(parameter) - 1
        del edge
    return uses


def _usual_uses(like: nn.Parameter, *, below_apply: bool) -> int:
    """Return the `_uses` of a parameter like this one for which there is no other reason."""
    requires_grad = like.requires_grad
    if (requires_grad, below_apply) not in _usual:
        parameter = nn.Parameter(torch.zeros(1), requires_grad)
        _usual[requires_grad, False] = _uses(parameter)
        with torch.enable_grad():
            _Count.apply(parameter, torch.zeros(1, requires_grad=True))
    return _usual[requires_grad, below_apply]


class _Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, learns: torch.Tensor) -> torch.Tensor:
        _usual[parameter.requires_grad, True] = _uses(parameter)
        return learns.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grads[0]
