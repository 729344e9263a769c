"""What ranks do in test_eager_models_on_ranks.py."""

from __future__ import annotations

import torch
from recurrent import Looped, Recurrent, batch

import zinf_compile
from zinf_compile.optim.eager_models import watch_steps


def step(rank: int, world: int) -> str:
    """Step a model of which nothing is compiled; return the error."""
    watch_steps()  # as at the start of a process
    for _ in range(40):  # other optimizers before it
        other = torch.nn.Linear(2, 2)
        other(torch.ones(2)).sum().backward()
        torch.optim.SGD(other.parameters()).step()
    model = Looped()
    model.compile(backend="zero_infinity", options={"compute": "fx"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, rank)).backward()
    before = model.head.weight.detach().clone()
    try:
        optimizer.step()
    except zinf_compile.UnsupportedModelError as error:
        assert torch.equal(model.head.weight, before)
        return str(error)
    return "no error"


def train(rank: int, world: int) -> None:
    """Train beside eager PyTorch on the mean of all ranks' losses, the LSTM being called by a module of its own."""
    torch.manual_seed(0)
    model = Recurrent(apart=True).double()
    eager = Recurrent(apart=True).double()
    eager.load_state_dict(model.state_dict())
    model.compile(backend="zero_infinity", options={"compute": "fx"})
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, eager))
    for number in range(3):
        model(batch(number, rank)).backward()
        torch.stack([eager(batch(number, other)) for other in range(world)]).mean().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    values = zinf_compile.full_state_dict(model)
    if rank == 0:
        torch.testing.assert_close(values, eager.state_dict(), rtol=1e-10, atol=1e-12)
