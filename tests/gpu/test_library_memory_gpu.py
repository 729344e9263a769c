"""What cuBLAS keeps for itself is there before memory is measured: training takes no more of it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from zinf_compile.runtime.system.library_memory import take_workspaces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_afterwards_leave_nothing_behind(dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    take_workspaces(device)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    x, weight = (torch.randn(64, 96, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    bias = torch.zeros(64, dtype=dtype, device=device, requires_grad=True)
    torch.utils.checkpoint.checkpoint(functional.linear, x, weight, bias, use_reentrant=False).sum().backward()
    torch.cuda.synchronize()
    del x, weight, bias
    assert torch.cuda.memory_allocated() == held
