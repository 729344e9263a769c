"""Memory that a parameter shares with other tensors when it is partitioned: refused by name, and never silently cut off."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Mlp, loss_of, vectors
from torch import nn
from training import BACKEND, assert_same_models, plain_step

from zinf_compile import UnsupportedModelError, UnsupportedOptimizerError
from zinf_compile.sharded import shared_memory
from zinf_compile.sharded.parameter import ShardedParameter

FX = {"compute": "fx"}


class Square(nn.Module):
    """Two layers alike, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x)) @ self.scale.t()).square().mean()


def tied_by_data(model: Square) -> None:
    model.second.weight.data = model.first.weight.data


def one_in_the_other(model: Square) -> None:
    model.second.bias.data = model.first.weight.data[3]


def a_buffer(model: Square) -> None:
    model.scale = model.second.weight.data[:4]


def side_by_side(model: Square) -> None:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.data = part.view(parameter.shape)


@pytest.mark.parametrize("options", [{"params": "device"}, {"device_memory": "64MiB"}], ids=["word", "cap"])
@pytest.mark.parametrize(
    ("share", "message"),
    [
        (tied_by_data, r"first.weight shares memory with parameter second.weight.*\(second.weight = first.weight\), which ties"),
        (
            one_in_the_other,
            r"first.weight shares memory with parameter second.bias; once partitioned .*second.bias.data.clone\(\)",
        ),
        (a_buffer, r"parameter second.weight shares memory with buffer scale.*compute scale from second.weight in the forward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_overlaps_is_refused_by_name(share: Callable[[Square], None], message: str, options: dict[str, Any]) -> None:
    torch.manual_seed(7)
    model = Square()
    share(model)
    twin = copy.deepcopy(model)
    with pytest.raises(UnsupportedModelError, match=message):
        torch.compile(model, backend=BACKEND, options={**FX, **options})(torch.ones(3, 16))
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert_same_models(twin, model)


@pytest.mark.parametrize("share", [tied_by_data, one_in_the_other, a_buffer])
def test_ordinary_parameters_go_on_sharing(share: Callable[[Square], None]) -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(7)
        model = Square()
        share(model)
        call = torch.compile(model, backend="zero_infinity", options=FX) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([plain_step(call, optimizer, (torch.ones(3, 16),)).item() for _ in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("share", [tied_by_data, one_in_the_other, a_buffer])
def test_what_is_not_trained_may_be_apart(share: Callable[[Square], None]) -> None:
    """A table that is a buffer and a frozen embedding's weight, say."""
    torch.manual_seed(7)
    eager = Square().requires_grad_(False)
    eager.second.bias.requires_grad_(share is not one_in_the_other)
    share(eager)
    ours = copy.deepcopy(eager)
    call = torch.compile(ours, backend=BACKEND, options=FX)
    x = torch.ones(3, 16, requires_grad=True)
    for run in (eager, call):
        x.grad = None
        run(x).backward()
    assert_same_models(eager, ours)
    assert {type(parameter) for parameter in ours.parameters()} == {ShardedParameter}


def test_parameters_side_by_side_share_nothing() -> None:
    torch.manual_seed(7)
    eager = Square()
    ours = copy.deepcopy(eager)
    side_by_side(ours)
    call = torch.compile(ours, backend=BACKEND, options=FX)
    for step in range(2):
        for model, run in ((eager, eager), (ours, call)):
            plain_step(run, torch.optim.SGD(model.parameters(), lr=0.1), (torch.full((3, 16), 1.0 + step),))
    assert {type(parameter) for parameter in ours.parameters()} == {ShardedParameter}
    assert_same_models(eager, ours)


def test_a_graph_behind_one_that_has_partitioned() -> None:
    """Each layer is a graph, and no module that has both is running."""
    torch.manual_seed(7)
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight.data = first.weight.data
    calls = [torch.compile(lambda x, layer=layer: layer(x), backend=BACKEND, options=FX) for layer in (first, second)]
    calls[0](torch.ones(3, 16))
    with pytest.raises(UnsupportedModelError, match=r"weight is in the memory that parameter .*weight had before"):
        calls[1](torch.ones(3, 16))
    assert type(second.weight) is nn.Parameter


@pytest.mark.parametrize("alone", [True, False])
def test_an_optimizer_of_a_flat_buffer_is_refused(alone: bool) -> None:
    torch.manual_seed(7)
    model = Square()
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in (model.first.weight, model.second.weight)]))
    model.first.weight.data, model.second.weight.data = (part.view(16, 16) for part in flat.data.split(256))
    optimizer = torch.optim.SGD([flat] if alone else [flat, model.first.bias], lr=0.1)
    torch.compile(model, backend=BACKEND, options=FX)(torch.ones(3, 16)).backward()
    flat.grad = torch.ones_like(flat)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        UnsupportedOptimizerError, match=r"SGD updates a tensor of shape \[512\] in the memory that parameter first"
    ):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_memory_whose_parameter_is_gone_is_free() -> None:
    """A kept state dict that models take over one after the other."""
    values = Mlp().state_dict()
    for _ in range(2):
        model = Mlp()
        model.load_state_dict(values, assign=True)
        loss_of(torch.compile(model, backend=BACKEND, options=FX)(*vectors(0))).backward()
        assert {type(parameter) for parameter in model.parameters()} == {ShardedParameter}
        del model
        torch.compiler.reset()
        gc.collect()


def test_memory_that_nobody_holds_is_forgotten() -> None:
    model = Mlp()
    loss_of(torch.compile(model, backend=BACKEND, options=FX)(*vectors(0))).backward()
    assert not shared_memory.forget_unused()
