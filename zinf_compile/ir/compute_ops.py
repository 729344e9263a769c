"""Operators of compute that PyTorch has none for, `zinf_compute::...`. Inductor runs operators that it doesn't know as they are.

Three write where their result belongs: matrix products, and copies, into a part of a larger matrix. Two serve a loss in chunks: a
check of its targets, and a gradient's way to the backward. One is the gradient of an embedding, summed in the same order at every
run: Inductor makes it of additions that its threads do in the order in which they arrive, so that on several threads two runs of
one script drift apart; PyTorch's own kernel divides the rows of the result among the threads instead.
"""

from __future__ import annotations

import torch
from torch.library import Library

from zinf_compile._torch import keeps_autograd_graph

_library = Library("zinf_compute", "DEF")
_library.define("mm_out(Tensor(a!) out, Tensor a, Tensor b) -> ()")
_library.define("addmm_out(Tensor(a!) out, Tensor bias, Tensor a, Tensor b, *, Scalar beta=1, Scalar alpha=1) -> ()")
_library.define("copy_out(Tensor(a!) out, Tensor value) -> ()")
_library.define("class_targets(Tensor target, SymInt classes, SymInt ignore_index) -> Tensor")
_library.define("take_scaled(Tensor saved, Tensor factor) -> Tensor")
_library.define(
    "embedding_gradient(Tensor grad, Tensor indices, SymInt num_weights, SymInt padding_idx, bool scale_grad_by_freq) -> Tensor"
)


def _mm_out(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


def _addmm_out(
    out: torch.Tensor, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> None:
    torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out)


def _copy_out(out: torch.Tensor, value: torch.Tensor) -> None:
    out.copy_(value)


def _class_targets(target: torch.Tensor, classes: int, ignore_index: int) -> torch.Tensor:
    """Return the targets with 0 for ignored ones; raise `IndexError`, as eager PyTorch does, for one that is no class."""
    ignored = target == ignore_index
    kept = target.masked_fill(ignored, 0)
    if target.device.type == "cpu" and target.numel():  # elsewhere it would wait for the device, whose gather checks
        for found in (int(kept.min()), int(kept.max())):
            if not 0 <= found < classes:
                raise IndexError(
                    f"Target {found} is out of bounds: the loss has classes 0 to {classes - 1}, and ignores {ignore_index}; "
                    "look for it in the targets (labels) of this call"
                )
    return kept


def _take_scaled(saved: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return `saved * factor`, in the memory of `saved` where autograd won't run this backward again.

    A head's gradient is as large as the head: a second copy would cost what the chunks save. The schema says nothing of the
    shared memory, because who saved it has no more use for it.
    """
    if keeps_autograd_graph():
        return saved * factor
    if factor.device.type == "cpu" and factor.item() == 1:
        return saved
    return saved.mul_(factor)


def _embedding_gradient(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    gradient: torch.Tensor = torch.ops.aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)
    return gradient


def _embedding_gradient_shape(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    return grad.new_empty((num_weights, grad.shape[-1]))


_library.impl("mm_out", _mm_out, "CompositeExplicitAutograd")
_library.impl("addmm_out", _addmm_out, "CompositeExplicitAutograd")
_library.impl("copy_out", _copy_out, "CompositeExplicitAutograd")
_library.impl("class_targets", _class_targets, "CompositeExplicitAutograd")
_library.impl("take_scaled", _take_scaled, "CompositeExplicitAutograd")
_library.impl("embedding_gradient", _embedding_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("zinf_compute::class_targets", lambda target, classes, ignore_index: torch.empty_like(target))
torch.library.register_fake("zinf_compute::take_scaled", lambda saved, factor: torch.empty_like(saved))
torch.library.register_fake("zinf_compute::embedding_gradient", _embedding_gradient_shape)

mm_out = torch.ops.zinf_compute.mm_out.default
"""`mm`, its result in `out`: a matrix of its sizes and type, which may be a part of another."""

addmm_out = torch.ops.zinf_compute.addmm_out.default
"""`addmm` likewise."""

copy_out = torch.ops.zinf_compute.copy_out.default
"""A copy likewise."""

class_targets = torch.ops.zinf_compute.class_targets.default
take_scaled = torch.ops.zinf_compute.take_scaled.default
embedding_gradient = torch.ops.zinf_compute.embedding_gradient.default
