"""Copies of whole values that eager calls are given: what such a call writes to one, or to a view of one, would be lost.

PyTorch refuses these writes where it can. Copies made without gradients are inference tensors, and so are views of them; those in
another type are where they are made in inference mode. A view of a copy that autograd records comes from a custom function:
PyTorch refuses to change it, or to use it once it was changed without gradients. `lost_write` finds the rest, but for what is
written through `detach()` or `data` of such a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf_compile._torch import tree_leaves, tree_map
from zinf_compile.runtime.memory.own_storage import with_own_storage


def unrecorded_copy(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what `make` returns as a tensor that can't be written to, nor be kept by autograd.

    In inference mode, where PyTorch would allow it, as it is: `lost_write` finds what is written to it.
    """
    value = make()
    if torch.is_inference_mode_enabled():
        return value
    with torch.inference_mode():
        return with_own_storage(value)


def versions(copies: Sequence[torch.Tensor]) -> list[int]:
    """Return the versions of copies before a call; inference tensors have none."""
    return [0 if copy.is_inference() else copy._version for copy in copies]


def lost_write(copy: torch.Tensor, version: int, result: Any) -> str:
    """Say that a call has changed a copy of this version, or returned a part through which it could be; empty if neither."""
    if copy.is_inference():
        return ""
    if copy._version != version:
        return "it changes values in place, of which it was given a copy"
    if any(not view.requires_grad for view in _views(result, [copy])):
        return "it returns a part of a copy, and what was written to that would be lost: take a copy of it, by index_select()"
    return ""


def are_writable(result: Any, copies: Sequence[torch.Tensor]) -> bool:
    """Return whether a call's result has a view of an inference tensor that is none itself."""
    return bool(_views(result, [copy for copy in copies if copy.is_inference()]))


def read_only(result: Any, copies: Sequence[torch.Tensor]) -> Any:
    """Return a call's result with views of copies that PyTorch refuses to change, where autograd records them."""
    found = {id(view) for view in _views(result, copies) if view.requires_grad}
    return tree_map(lambda item: _View.apply(item) if id(item) in found else item, result) if found else result


def _views(result: Any, copies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not copies:
        return []
    places = {_place(copy) for copy in copies} - {None}
    leaves = [item for item in tree_leaves(result) if type(item) is torch.Tensor]
    return [item for item in leaves if _place(item) in places and not item.is_inference()]


def _place(tensor: torch.Tensor) -> int | None:
    """Return where a tensor's memory begins; None where it has none of its own, as a sparse tensor or one inside `vmap`."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


class _View(torch.autograd.Function):
    """The same tensor, as a view that nobody may change in place."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
