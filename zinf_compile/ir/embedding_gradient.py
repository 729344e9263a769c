"""The gradient of an embedding, summed in the same order at every run.

Inductor turns it into additions that its threads make in the order in which they arrive, so that on several threads two runs of
one script drift apart. PyTorch's own kernel divides the rows of the result among the threads instead. It is wrapped in an
operator of this package, because Inductor runs operators that it doesn't know as they are.
"""

from __future__ import annotations

import torch
from torch.library import Library

_library = Library("zinf_compute", "DEF")
_library.define(
    "embedding_gradient(Tensor grad, Tensor indices, SymInt num_weights, SymInt padding_idx, bool scale_grad_by_freq) -> Tensor"
)


def _kernel(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    gradient: torch.Tensor = torch.ops.aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)
    return gradient


def _shape(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    return grad.new_empty((num_weights, grad.shape[-1]))


_library.impl("embedding_gradient", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("zinf_compute::embedding_gradient", _shape)

embedding_gradient = torch.ops.zinf_compute.embedding_gradient.default
