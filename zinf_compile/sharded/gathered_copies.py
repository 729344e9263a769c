"""Copies of whole values that eager calls are given: what such a call writes to one, or to a view of one, would be lost.

PyTorch refuses these writes where it can. Copies made without gradients are inference tensors, and so are views of them. A view
of a copy that autograd records comes from a custom function, whose views it lets nobody change. `changed_or_viewed` finds the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf_compile._torch import tree_leaves, tree_map
from zinf_compile.runtime.memory.own_storage import with_own_storage


def inference_copy(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what `make` returns as a tensor that can't be written to, nor be kept by autograd."""
    value = make()
    with torch.inference_mode():
        return with_own_storage(value)


def versions(copies: Sequence[torch.Tensor]) -> list[int]:
    """Return the versions of copies before a call; inference tensors have none."""
    return [0 if copy.is_inference() else copy._version for copy in copies]


def changed_or_viewed(copy: torch.Tensor, version: int, result: Any) -> bool:
    """Return whether a call has changed a copy of this version, or returned a view through which code could do it unnoticed."""
    if copy.is_inference():
        return False
    return copy._version != version or any(not view.requires_grad for view in _views(result, [copy]))


def read_only(result: Any, copies: Sequence[torch.Tensor]) -> Any:
    """Return a call's result with views of copies that PyTorch refuses to change, where autograd records them."""
    found = {id(view) for view in _views(result, copies) if view.requires_grad}
    return tree_map(lambda item: _View.apply(item) if id(item) in found else item, result) if found else result


def _views(result: Any, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    places = {copy.untyped_storage().data_ptr() for copy in copies}
    leaves = [item for item in tree_leaves(result) if type(item) is torch.Tensor]
    return [item for item in leaves if item.untyped_storage().data_ptr() in places and not item.is_inference()]


class _View(torch.autograd.Function):
    """The same tensor, as a view that nobody may change in place."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
