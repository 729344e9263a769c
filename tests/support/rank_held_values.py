"""What ranks do in test_held_values_on_ranks.py."""

from __future__ import annotations

import torch
from torch.nn import functional
from training import BACKEND
from used_before import UsedBefore

import zinf_compile
from zinf_compile._torch import no_torch_function


def train(rank: int, world: int) -> None:
    """Train beside eager PyTorch on the mean of all ranks' losses; eager code uses parameters before they are partitioned."""
    torch.manual_seed(0)
    model, eager = UsedBefore().double(), UsedBefore().double()
    eager.load_state_dict(model.state_dict())
    call = torch.compile(model, backend=BACKEND)
    ours, theirs = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5) for m in (model, eager))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        batches = torch.randn(world, 2, 4, 8, generator=generator, dtype=torch.float64)
        functional.mse_loss(call(batches[rank]), batches[rank].roll(1, -1)).backward()
        torch.stack([functional.mse_loss(eager(x), x.roll(1, -1)) for x in batches]).mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    with no_torch_function():
        assert not any(p.untyped_storage().nbytes() for p in model.parameters())
    values = zinf_compile.full_state_dict(model)
    if rank == 0:
        torch.testing.assert_close(values, eager.state_dict(), rtol=1e-10, atol=1e-12)
