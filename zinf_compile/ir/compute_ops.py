"""What is written where it belongs: matrix products, and copies, into a part of a larger matrix."""

from __future__ import annotations

import torch
from torch.library import Library

_library = Library("zinf_compute", "FRAGMENT")
_library.define("mm_into(Tensor(a!) out, Tensor a, Tensor b) -> ()")
_library.define("addmm_into(Tensor(a!) out, Tensor bias, Tensor a, Tensor b, *, Scalar beta=1, Scalar alpha=1) -> ()")
_library.define("copy_into(Tensor(a!) out, Tensor value) -> ()")


def _mm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


def _addmm_into(
    out: torch.Tensor, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> None:
    torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out)


def _copy_into(out: torch.Tensor, value: torch.Tensor) -> None:
    out.copy_(value)


_library.impl("copy_into", _copy_into, "CompositeExplicitAutograd")
_library.impl("mm_into", _mm_into, "CompositeExplicitAutograd")
_library.impl("addmm_into", _addmm_into, "CompositeExplicitAutograd")

mm_into = torch.ops.zinf_compute.mm_into.default
"""`mm`, its result in `out`: a matrix of its sizes and type, which may be a part of another."""

addmm_into = torch.ops.zinf_compute.addmm_into.default
"""`addmm` likewise."""

copy_into = torch.ops.zinf_compute.copy_into.default
"""A copy likewise."""
