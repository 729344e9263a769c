"""What ranks do in test_wrapping_optimizers_on_ranks.py."""

from __future__ import annotations

from typing import Any

import torch
from models import Mlp, vectors
from training import BACKEND
from wrapping_optimizers import WRAPPERS, train

import zinf_compile


def compare(rank: int, world: int, name: str) -> None:
    """Train beside eager PyTorch on the mean of all ranks' losses."""

    def own(model: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = model(*[value.double() for value in vectors(number, rank)])
        return loss

    def mean(model: Any, number: int) -> torch.Tensor:
        return torch.stack([model(*[v.double() for v in vectors(number, other)]) for other in range(world)]).mean()

    torch.manual_seed(0)
    eager, model = Mlp().double(), Mlp().double()
    model.load_state_dict(eager.state_dict())
    model.compile(backend=BACKEND)
    train(eager, WRAPPERS[name](eager.parameters()), mean)
    train(model, WRAPPERS[name](model.parameters()), own)
    values = zinf_compile.full_state_dict(model)
    if rank == 0:
        torch.testing.assert_close(values, dict(eager.state_dict()), rtol=1e-10, atol=1e-12)
