"""Models on meta get their values from what `zinf_compile.save` has made, straight at their tiers; then their optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zinf_compile
from zinf_compile.errors import CheckpointError, UnsupportedModelError
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

ALL_AWAY = dict.fromkeys(("params", "grads", "optimizer"), "nvme")


class Tied(nn.Module):
    """Tied, frozen and 0-d parameters, one of 16 bits, a weight in channels-last, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 7)
        self.head = nn.Linear(7, 11)
        self.head.weight = self.words.weight
        self.frozen = nn.Linear(3, 2).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.short = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.zeros(3))


def trained() -> tuple[Tied, torch.optim.Optimizer]:
    """Return a model and its optimizer after a step with gradients of noise."""
    torch.manual_seed(3)
    model = Tied()
    model.seen += 1
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("options", [{}, {"tile": 32}, ALL_AWAY])
def test_a_model_on_meta(options: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = trained()
    zinf_compile.save(tmp_path / "saved", model, optimizer, extra={"step": 1})
    with torch.device("meta"):
        other = Tied()
    options = {**options, "nvme": str(tmp_path)} if "nvme" in options.values() else options
    zinf_compile.partition(other, checkpoint=tmp_path / "saved", **options)
    assert all(isinstance(p, ShardedParameter) for p in other.parameters())
    torch.testing.assert_close(dict(zinf_compile.full_state_dict(other)), dict(model.state_dict()), rtol=0, atol=0)
    its = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.5)
    assert zinf_compile.load(tmp_path / "saved", other, its) == {"step": 1}
    found, expected = zinf_compile.full_optimizer_state_dict(its), optimizer.state_dict()
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(dict(zinf_compile.full_state_dict(other)), dict(model.state_dict()), rtol=0, atol=0)


def test_what_does_not_fit_leaves_it_on_meta(tmp_path: Path) -> None:
    model, _ = trained()
    folder = zinf_compile.save(tmp_path / "saved", model)
    with torch.device("meta"):
        other = Tied()
        other.more = nn.Linear(2, 2)
        other.scale = nn.Parameter(torch.ones(2))
    with pytest.raises(
        CheckpointError, match=r"missing: more\.weight; missing: more\.bias; shape of scale: \[\] in the checkpoint"
    ):
        zinf_compile.partition(other, checkpoint=folder)
    with torch.device("meta"):
        other = Tied()
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")
        path.write_bytes(content[:begin] + bytes(byte ^ 1 for byte in content[begin:]))
    with pytest.raises(CheckpointError, match=r"is damaged: the checksum of model\.\S+ differs"):
        zinf_compile.partition(other, checkpoint=folder)
    assert {p.device.type for p in other.parameters()} == {"meta"}


def test_weights_beside_it_come_first(tmp_path: Path) -> None:
    """A folder that others' programs load too is read as they read it."""
    model, _ = trained()
    zinf_compile.save(tmp_path, model)
    with torch.no_grad():
        model.scale.fill_(7)
    zinf_compile.save_safetensors(model, tmp_path)
    with torch.device("meta"):
        other = Tied()
    zinf_compile.partition(other, checkpoint=tmp_path)
    assert float(zinf_compile.full_state_dict(other)["scale"]) == 7


class Positions(nn.Module):
    """Has a buffer that no checkpoint has; `device`: where it is made."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("positions", torch.arange(5.0, device=device), persistent=False)


class Reset(Positions):
    """Fills it again."""

    def reset_parameters(self) -> None:
        self.positions.copy_(torch.arange(5.0))


def fill_positions(module: nn.Module) -> None:
    """Fill it from outside."""
    if isinstance(module, Positions):
        module.positions.copy_(torch.arange(5.0))  # type: ignore[operator]


def on_meta(build: Callable[[], Any], assigned: torch.Tensor | None = None) -> Any:
    with torch.device("meta"):
        model = build()
    if assigned is not None:
        model.positions = assigned
    return model


def initialized(folder: Path) -> Any:
    model = zinf_compile.partition(on_meta(Positions), init=fill_positions)
    zinf_compile.load(folder, model)
    return model


def built_partitioned(folder: Path) -> Any:
    with zinf_compile.partitioned():
        model = Positions()
    zinf_compile.load(folder, model)
    return model


WAYS: dict[str, Callable[[Path], Any]] = {
    'make it with device="cpu", in its constructor': lambda folder: zinf_compile.partition(
        on_meta(lambda: Positions("cpu")), checkpoint=folder
    ),
    "or by assigning it to the model on meta": lambda folder: zinf_compile.partition(
        on_meta(Positions, torch.arange(5.0)), checkpoint=folder
    ),
    "let its module's reset_parameters() fill it": lambda folder: zinf_compile.partition(on_meta(Reset), checkpoint=folder),
    "or partition(init=...) without checkpoint=, and load() a checkpoint then": initialized,
    "or build the model, not on meta, inside `with zinf_compile.partitioned(...):`": built_partitioned,
}


def test_each_way_to_a_buffer_that_is_in_no_checkpoint(tmp_path: Path) -> None:
    whole = Positions()
    folder = zinf_compile.save(tmp_path / "saved", whole)
    with pytest.raises(UnsupportedModelError, match="no initialiser gave positions a value") as caught:
        zinf_compile.partition(on_meta(Positions), checkpoint=folder)
    assert "checkpoint=..." not in str(caught.value), "no checkpoint has it"
    for way, follow in WAYS.items():
        assert way in str(caught.value)
        model = follow(folder)
        assert torch.equal(model.positions, whole.positions)
        assert torch.equal(zinf_compile.full_state_dict(model)["linear.weight"], whole.linear.weight)
        assert isinstance(model.linear.weight, ShardedParameter)


def test_a_parameter_without_a_value_beside_it_may_come_from_a_checkpoint() -> None:
    def build() -> nn.Module:
        model = Positions()
        model.scale = nn.Parameter(torch.ones(()))
        return model

    with pytest.raises(UnsupportedModelError, match=r"no initialiser for scale, positions.*, or checkpoint=\.\.\."):
        zinf_compile.partition(on_meta(build))
    with pytest.raises(UnsupportedModelError, match=r"no initialiser for positions.* No checkpoint has what is not persistent"):
        zinf_compile.partition(on_meta(Positions))
