"""Loads under a memory cap: one that is too small is refused before anything changes, and the cap that the error names works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from named_cap import named_cap
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.errors import BudgetError

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

BATCH = torch.ones(2, 400)


class Stack(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(400, 300, bias=False)
        self.second = nn.Linear(300, 500, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def build(options: dict[str, Any], *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer of three states for each element, which is more than the first call counts."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    model = Stack()
    model.compile(backend=BACKEND, options={"compute": "fx", "compute_shape": {"piece_numel": 1 << 14}, **options})
    return model, torch.optim.AdamW(model.parameters(), amsgrad=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Accumulate two batches, then step."""
    for _ in range(2):
        model(BATCH).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    zinf_compile.synchronize()


def resumed(folder: Path, cap: int) -> tuple[str, str]:
    """Load onto a model that was called once, and train; return where that was refused, and what the error says."""
    model, optimizer = build({"device_memory": cap}, seed=1)
    where = "call"
    try:
        with torch.no_grad():
            model(BATCH)
        before = {name: value.clone() for name, value in zinf_compile.full_state_dict(model).items()}
        where = "load"
        zinf_compile.load(folder, model, optimizer)
        where = "training"
        train(model, optimizer)
    except BudgetError as error:
        if where == "load":
            torch.testing.assert_close(dict(zinf_compile.full_state_dict(model)), before, rtol=0, atol=0)
            assert not optimizer.state
        return where, str(error)
    return "", ""


def test_the_smallest_cap_is_named_and_works(tmp_path: Path) -> None:
    cap = 8_000_000  # enough for the first call, which counts two states for each element
    model, optimizer = build({})
    train(model, optimizer)
    folder = zinf_compile.save(tmp_path / "saved", model, optimizer)
    refusals = []
    while (refusal := resumed(folder, cap))[0]:
        refusals.append(refusal[0])
        works = named_cap(refusal[1])
        assert works > cap, refusal
        cap = works
    assert refusals[0] == "load", refusals
    assert resumed(folder, cap - 1)[0]


ALL_AWAY = dict.fromkeys(("params", "grads", "optimizer"), "nvme")


def resumed_on_meta(folder: Path, cap: int, options: dict[str, Any]) -> tuple[str, str]:
    """The same onto a model on meta; one that was refused is there again."""
    zinf_compile.reset()
    with torch.device("meta"):
        model = Stack()
    pieces = {"compute_shape": {"piece_numel": 1 << 14}}
    model.compile(backend="zero_infinity", options={"compute": "fx", **pieces, **options, "device_memory": cap})
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    where = "load"
    try:
        zinf_compile.load(folder, model, optimizer)
        (held,) = {account["peak"]["all"] for account in zinf_compile.stats(model)["memory"].values()}
        assert held <= cap, "nor does what is held exceed it"
        where = "training"
        train(model, optimizer)
    except BudgetError as error:
        if where == "load":
            assert {type(p) for p in model.parameters()} == {nn.Parameter}
            assert {p.device.type for p in model.parameters()} == {"meta"}
            assert not optimizer.state
        return where, str(error)
    return "", ""


@pytest.mark.parametrize("options", [{}, {"tile": 1 << 16}, {"optimizer": "nvme"}, ALL_AWAY, {**ALL_AWAY, "tile": 1 << 16}])
def test_the_smallest_cap_of_a_model_on_meta(options: dict[str, Any], tmp_path: Path) -> None:
    options = {**options, "nvme": str(tmp_path)} if "nvme" in options.values() else options
    model, optimizer = build(options)
    train(model, optimizer)
    folder = zinf_compile.save(tmp_path / "saved", model, optimizer, wait=True)
    cap, loads = 100_000, 0
    while (refusal := resumed_on_meta(folder, cap, options))[0]:
        works = named_cap(refusal[1])
        assert works > cap, refusal
        cap, loads = works, works if refusal[0] == "load" else loads
    assert loads, "a load was refused"
    assert resumed_on_meta(folder, loads, options)[0] != "load"
    assert resumed_on_meta(folder, loads - 1, options)[0]
