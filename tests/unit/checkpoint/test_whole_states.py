"""States of parameters that stay whole: loaded, they have their parameter's strides, by which fused kernels go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import zinf_compile


def net(seed: int) -> tuple[nn.Module, Optimizer]:
    """Return a model with whole parameters in several orders, and a partitioned layer, and its optimizer."""
    torch.manual_seed(seed)
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    turned = nn.Linear(5, 4)
    turned.weight = nn.Parameter(torch.randn(5, 4).t())
    with torch.device("meta"):
        layer = nn.Linear(4, 2)
    zinf_compile.partition(layer)
    model = nn.ModuleList([convolution, turned, layer])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def steps(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(grad)
        optimizer.step()


def by_save(folder: Path, model: nn.Module, optimizer: Optimizer) -> Callable[[nn.Module, Optimizer], Any]:
    zinf_compile.save(folder, model, optimizer, wait=True)
    return lambda *fresh: zinf_compile.load(folder, *fresh)


def by_full_states(folder: Path, model: nn.Module, optimizer: Optimizer) -> Callable[[nn.Module, Optimizer], Any]:
    torch.save([zinf_compile.full_state_dict(model), zinf_compile.full_optimizer_state_dict(optimizer)], folder / "file.pt")

    def load(model: nn.Module, optimizer: Optimizer) -> None:
        values, states = torch.load(folder / "file.pt", weights_only=True)
        zinf_compile.load_full_state_dict(model, values)
        zinf_compile.load_full_optimizer_state_dict(optimizer, states)

    return load


@pytest.mark.parametrize("keep", [by_save, by_full_states])
def test_training_goes_on_as_without_a_break(keep: Callable[..., Callable[[nn.Module, Optimizer], Any]], tmp_path: Path) -> None:
    model, optimizer = net(0)
    steps(model, optimizer, 0)
    load = keep(tmp_path, model, optimizer)
    fresh = net(1)
    load(*fresh)
    for each in ((model, optimizer), fresh):
        steps(*each, 1)
    torch.testing.assert_close(dict(fresh[0].state_dict()), dict(model.state_dict()), rtol=0, atol=0)


class OwnLayout(torch.optim.SGD):
    """Wraps its state dict, as Lookahead does."""

    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["base"])


def test_an_optimizer_with_a_layout_of_its_own_loads_what_it_takes() -> None:
    model = nn.Linear(2, 2)
    optimizers = [OwnLayout(model.parameters(), lr=rate, momentum=0.9) for rate in (0.1, 0.2)]
    zinf_compile.load_full_optimizer_state_dict(optimizers[1], optimizers[0].state_dict())
    assert optimizers[1].param_groups[0]["lr"] == 0.1
    with pytest.raises(zinf_compile.UnsupportedOptimizerError, match="it has no 'state'"):
        zinf_compile.load_full_optimizer_state_dict(torch.optim.SGD(model.parameters()), optimizers[0].state_dict())


def test_a_state_is_needed_on_each_rank_where_nothing_is_partitioned() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for nothing in (None, {}):
        with pytest.raises(zinf_compile.UnsupportedModelError, match="or an empty one, and nothing is partitioned: then"):
            zinf_compile.load_full_state_dict(model, nothing)
        with pytest.raises(zinf_compile.UnsupportedOptimizerError, match=r"none was given, .* call it once on all"):
            zinf_compile.load_full_optimizer_state_dict(optimizer, nothing)
