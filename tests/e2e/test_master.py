"""bf16 parameters that are updated in fp32: the numbers of a hand-written loop with master copies, wherever states live."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import TiedWords, loss_of, tokens
from tiers import in_pieces
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

STEPS = 6
OPTIONS: dict[str, Any] = {"compute": "fx", "master": "float32"}


def build() -> nn.Module:
    torch.manual_seed(1)
    return TiedWords().bfloat16()


@torch.no_grad()
def step_by_hand(model: nn.Module, masters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Update master copies by the gradients of a model, and the model by these."""
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad, p.grad = p.grad.float(), None  # type: ignore[union-attr]
    optimizer.step()
    for master, p in zip(masters, model.parameters(), strict=True):
        p.copy_(master)


def train(call: Any, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
    """Take the steps of these numbers."""
    for number in numbers:
        loss_of(call(*tokens(number))).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand() -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses and master copies of what this option stands for."""
    model = build()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    losses = []
    for number in range(STEPS):
        loss = loss_of(model(*tokens(number)))
        loss.backward()
        step_by_hand(model, masters, optimizer)
        losses.append(loss.item())
    return losses, masters


class Scaled(nn.Module):
    """With a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (self.layer(x) * self.scale).square().mean()
        return out


@pytest.mark.parametrize("tiers", [{}, {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}], ids=["in memory", "on a drive"])
@pytest.mark.filterwarnings("ignore::zinf_compile.StoreWarning")
def test_a_parameter_without_dimensions_has_a_master_copy_too(tiers: dict[str, str], tmp_path: Path) -> None:
    """Of its updates each is less than half of what bf16 can tell apart there."""
    torch.manual_seed(1)
    ours = Scaled().bfloat16()
    model = copy.deepcopy(ours)
    ours.compile(backend=BACKEND, options=OPTIONS | tiers | ({"nvme": tmp_path} if tiers else {}))
    masters = [p.detach().float() for p in model.parameters()]
    theirs, optimizer = (torch.optim.AdamW(p, lr=5e-4, foreach=False) for p in (masters, ours.parameters()))
    before = model.scale.item()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    for _ in range(20):
        model(x).backward()
        step_by_hand(model, masters, theirs)
        ours(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.scale.item() != before
    for master, state in zip(masters, optimizer.state_dict()["state"].values(), strict=True):
        assert torch.equal(state["master"], master)
    assert zinf_compile.full_state_dict(ours)["scale"].item() == model.scale.item()


def with_option(options: dict[str, Any], *, reload_at: int | None = None) -> tuple[list[float], list[torch.Tensor]]:
    torch.compiler.reset()
    model = build()
    model.compile(backend=BACKEND, options=OPTIONS | options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for number in range(STEPS):
        if number == reload_at:
            saved = copy.deepcopy((zinf_compile.full_state_dict(model), optimizer.state_dict()))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            zinf_compile.keep_precision(optimizer)
            optimizer.load_state_dict(saved[1])
            zinf_compile.load_full_state_dict(model, saved[0])
        loss = loss_of(model(*tokens(number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [state["master"] for state in optimizer.state_dict()["state"].values()]


def assert_equal(found: tuple[list[float], list[torch.Tensor]], expected: tuple[list[float], list[torch.Tensor]]) -> None:
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert all(master.dtype == torch.float32 for master in found[1])


@pytest.mark.parametrize("reload_at", [None, 3])
@pytest.mark.parametrize("where", ["memory", "optimizer", "all"])
@pytest.mark.parametrize("piece", [128, 1 << 20])
def test_master_copies(where: str, reload_at: int | None, piece: int, tmp_path: Path) -> None:
    away = {"memory": (), "optimizer": ("optimizer",), "all": ("params", "grads", "optimizer")}[where]
    options: dict[str, Any] = dict.fromkeys(away, "nvme") | ({"nvme": tmp_path} if away else {}) | in_pieces(piece)
    assert_equal(with_option(options, reload_at=reload_at), by_hand())


@pytest.mark.slow
@pytest.mark.thorough
def test_every_placement(tmp_path: Path) -> None:
    expected = by_hand()
    for tiers in itertools.product(("device", "host", "nvme"), repeat=3):
        options: dict[str, Any] = dict(zip(("params", "grads", "optimizer"), tiers, strict=True))
        with simulating(SimulatedDevice()):
            assert_equal(with_option(options | ({"nvme": tmp_path} if "nvme" in tiers else {}), reload_at=2), expected)


def test_values_loaded_from_outside_count() -> None:
    """A master copy follows its parameter where the model was loaded; where it agrees, it keeps its digits."""
    model, other = build(), build()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    model.compile(backend=BACKEND, options=OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        loss_of(model(*tokens(0))).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = [state["master"].clone() for state in optimizer.state_dict()["state"].values()]
    zinf_compile.load_full_state_dict(model, copy.deepcopy(zinf_compile.full_state_dict(model)))
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[0]["weight_decay"] = 0.0
    step()
    assert all(torch.equal(a, b["master"]) for a, b in zip(before, optimizer.state_dict()["state"].values(), strict=True))
    zinf_compile.load_full_state_dict(model, other.state_dict())
    step()
    masters = [state["master"] for state in optimizer.state_dict()["state"].values()]
    assert all(torch.equal(m, p.float()) for m, p in zip(masters, other.parameters(), strict=True))


def test_a_model_all_in_16_bits_gets_one_warning() -> None:
    model = build()
    model.compile(backend=BACKEND, options={"compute": "fx"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of(model(*tokens(0))).backward()
    with pytest.warns(UserWarning, match=r"all \d+ parameters are torch.bfloat16 .* options=\{\"master\": \"float32\"\}"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_rounded_states_are_named() -> None:
    model = build()
    model.compile(backend=BACKEND, options=OPTIONS)
    loss_of(model(*tokens(0))).backward()
    (first := torch.optim.AdamW(model.parameters())).step()
    second = torch.optim.AdamW(model.parameters())
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match=r"states exp_avg, exp_avg_sq, master of this AdamW .*keep_precision\(optimizer\)"):
        second.step()


@pytest.mark.filterwarnings("ignore:all . parameters are torch.bfloat16")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", ["device", "nvme", "ordinary"])
def test_states_are_rounded_where_no_master_copies_are_kept(early: bool, kind: str, tmp_path: Path) -> None:
    """Loaded from a checkpoint that has some; as PyTorch's `load_state_dict` rounds them, before partitioning as after it."""

    def made(options: dict[str, Any], backend: str = BACKEND) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model = build()
        call = torch.compile(model, backend=backend, options=options)
        return model, call, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(call: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        loss_of(call(*tokens(number))).backward()
        optimizer.step()
        optimizer.zero_grad()

    its_model, its_call, its = made(OPTIONS)
    for number in range(2):
        step(its_call, its, number)
    zinf_compile.save(tmp_path / "saved", its_model, its, wait=True)
    on_drive = {"optimizer": "nvme", "nvme": str(tmp_path)} if kind == "nvme" else {}
    if kind == "ordinary":
        model, call, optimizer = made({"compute": "fx"}, "zero_infinity")
    else:
        model, call, optimizer = made({**OPTIONS, "master": None, **on_drive})
    if not early:
        step(call, optimizer, 5)
    zinf_compile.load(tmp_path / "saved", model, optimizer)
    plain = build()
    plain.load_state_dict(its_model.state_dict())
    eager = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    given = its.state_dict()
    given["state"] = {key: {n: v for n, v in state.items() if n != "master"} for key, state in given["state"].items()}
    eager.load_state_dict(given)
    for number in range(2, 4):
        step(call, optimizer, number)
        step(torch.compile(plain, backend="aot_eager"), eager, number)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    found = optimizer.state_dict()["state"]
    assert all("master" not in state for state in found.values())
    for key, state in eager.state_dict()["state"].items():
        torch.testing.assert_close({n: found[key][n] for n in state}, state, rtol=0, atol=0)


STARTED: dict[str, Any] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}


@pytest.mark.filterwarnings("ignore:all . parameters are torch.bfloat16")
@pytest.mark.parametrize("kind", STARTED)
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_states_made_without_master_copies_go_on_in_their_type(tier: str, kind: str, tmp_path: Path) -> None:
    model, ours = build(), build()
    make = STARTED[kind]
    theirs, optimizer = make(model.parameters()), make(ours.parameters())
    on_drive = {**dict.fromkeys(("params", "optimizer"), "nvme"), "nvme": str(tmp_path)} if tier == "nvme" else {}
    ordinary = torch.compile(ours, backend="zero_infinity", options={"compute": "fx"})
    for each, call, by in ((model, model, theirs), (ours, ordinary, optimizer)):
        loss_of(call(*tokens(0))).backward()
        by.step()
        each.zero_grad()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    precise = make(masters)
    for p, master in zip(model.parameters(), masters, strict=True):
        precise.state[master] = {n: v.float() for n, v in theirs.state[p].items() if isinstance(v, torch.Tensor)}
    call = torch.compile(ours, backend=BACKEND, options=OPTIONS | on_drive)
    for number in range(1, 4):
        loss_of(call(*tokens(number))).backward()
        said = contextlib.nullcontext() if number > 1 else pytest.warns(UserWarning, match="made without master copies")
        with said:
            optimizer.step()
        optimizer.zero_grad()
        loss_of(model(*tokens(number))).backward()
        step_by_hand(model, masters, precise)
    torch.testing.assert_close(dict(ours.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["load", "full", "torch"])
def test_precise_states_wait_for_the_partitioning(way: str, tmp_path: Path) -> None:
    """Loaded from one file before the first compiled call, and without a warning."""

    def made() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model = build()
        return model, torch.compile(model, backend=BACKEND, options=OPTIONS), torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, call, optimizer = made()
    train(call, optimizer, range(2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(call, optimizer, range(2, 4))
    again, call, its = made()
    if way == "load":
        zinf_compile.load(tmp_path / "saved.pt", again, its)
    else:
        saved = torch.load(tmp_path / "saved.pt")
        again.load_state_dict(saved["model"])
        if way == "torch":
            zinf_compile.keep_precision(its)
            its.load_state_dict(saved["optimizer"])
        else:
            zinf_compile.load_full_optimizer_state_dict(its, saved["optimizer"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(call, its, range(2, 4))
    torch.testing.assert_close(its.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


class OwnMasters(torch.optim.Optimizer):
    """Keeps master copies by itself, under the very name."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.detach().float().clone())
                master.sub_(p.grad.float(), alpha=group["lr"])
                p.copy_(master)


@pytest.mark.filterwarnings("ignore:all . parameters are torch.bfloat16")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", [BACKEND, "zero_infinity"], ids=["partitioned", "ordinary"])
def test_master_copies_of_the_optimizers_own_are_kept(backend: str, dtype: torch.dtype, early: bool, tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model = build().to(dtype)
        return model, torch.compile(model, backend=backend, options={"compute": "fx"}), OwnMasters(model.parameters(), 0.01)

    model, call, optimizer = made()
    train(call, optimizer, range(3))
    zinf_compile.save(tmp_path / "saved", model, optimizer, wait=True)
    train(call, optimizer, range(3, 6))
    again, call, its = made()
    if not early:
        train(call, its, [7])
    zinf_compile.load(tmp_path / "saved", again, its)
    if early:
        train(call, its, range(3, 6))
    else:  # through whole states as well
        whole = zinf_compile.full_optimizer_state_dict(its)
        its.state.clear()
        zinf_compile.load_full_optimizer_state_dict(its, whole)
        train(call, its, range(3, 6))
    plain = build().to(dtype)
    eager = OwnMasters(plain.parameters(), 0.01)
    train(torch.compile(plain, backend="aot_eager"), eager, range(6))
    for each, by in ((model, optimizer), (again, its)):
        torch.testing.assert_close(dict(each.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
        torch.testing.assert_close(by.state_dict()["state"], eager.state_dict()["state"], rtol=0, atol=0)
