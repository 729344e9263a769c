"""Tensors of the same memory as others, with a storage of their own that begins where the values do.

Who saves or compares tensors by storage sees the value alone, not all that lies beside it.
"""

from __future__ import annotations

import torch


def with_own_storage(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the memory of `values`, which stays as long as there is either."""
    capsule = torch.utils.dlpack.to_dlpack(values)  # type: ignore[attr-defined]
    return torch.utils.dlpack.from_dlpack(capsule)  # given the tensor itself, it refuses accelerators that it doesn't know
