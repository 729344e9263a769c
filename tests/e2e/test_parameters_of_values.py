"""A parameter made of the values of a partitioned one: a deep copy is partitioned, a `torch.nn.Parameter` of them is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from training import BACKEND, adamw

import zinf_compile

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.words(tokens[:, :-1]))
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def run(options: dict[str, Any] | None, untie: Any) -> tuple[list[float], nn.Module]:
    torch.compiler.reset()
    zinf_compile.reset()
    torch.manual_seed(0)
    model, losses = Tied(), list[float]()
    if options is not None:
        model.compile(backend=BACKEND, options={"compute": "fx", **options})
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        optimizer = adamw(model.parameters())
        for _ in range(2):
            loss = model(torch.randint(0, 64, (4, 9), generator=generator))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if not number:
            model.head.weight = untie(model.words.weight)
    return losses, model


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"params": "nvme", "nvme": str(tmp_path)}


def test_a_deep_copy_unties(options: dict[str, Any]) -> None:
    expected, eager = run(None, copy.deepcopy)
    found, model = run(options, copy.deepcopy)
    assert found == expected
    values = zinf_compile.full_state_dict(model)
    assert all(torch.equal(value, values[name]) for name, value in eager.state_dict().items())


def test_a_parameter_of_values_that_are_partitioned_is_refused_before_it_trains(options: dict[str, Any]) -> None:
    with pytest.raises(zinf_compile.PartitionedParameterError, match=r"like parameter words\.weight.*copy\.deepcopy\(p\)"):
        run(options, lambda weight: nn.Parameter(weight.detach().clone()))


def test_what_is_not_trained_is_saved_whole(options: dict[str, Any], tmp_path: Path) -> None:
    """Such as an average: element-wise arithmetic works on it."""
    _, model = run(options, copy.deepcopy)
    average = nn.Parameter(model.words.weight.detach().clone(), requires_grad=False)
    average.mul_(0.5)
    model.average = average
    model.register_buffer("last", model.words.weight.detach().clone())
    found = zinf_compile.full_state_dict(model)
    assert {name: type(value) for name, value in found.items()} == dict.fromkeys(found, torch.Tensor)
    assert torch.equal(found["average"], 0.5 * found["words.weight"])
    assert torch.equal(found["last"], found["words.weight"])
    zinf_compile.save_safetensors(model, tmp_path / "saved")
    from safetensors.torch import load_file  # noqa: PLC0415

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in saved.items())
