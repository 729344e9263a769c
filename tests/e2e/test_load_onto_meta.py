"""Loads onto a model on meta that was compiled and never called: straight to its tiers, for optimizers made before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_saves import damage_a_state
from tier_twins import PIECE, Trained, check_same, compare, twins
from tiers import Placement, Sundry, options_for
from torch import nn
from torch.optim import Optimizer
from training import adamw

import zinf_compile
from zinf_compile.errors import CheckpointError, StepFailedError, UnsupportedModelError
from zinf_compile.sharded.parameter import ShardedParameter

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

ALL_AWAY: Placement = ("nvme",) * 3
PLACEMENTS: list[Placement] = [ALL_AWAY, ("device", "device", "nvme"), ("device",) * 3]


def in_place(model: nn.Module, options: dict[str, Any]) -> Any:
    model.compile(backend="zero_infinity", options=options)
    return model


def wrapped(model: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(model, backend="zero_infinity", options=options)


def on_meta(
    folder: Path, placement: Placement, *, compiled: Callable[..., Any] = in_place, **others: Any
) -> tuple[Any, Sundry, Optimizer]:
    """Return a compiled model on meta, the model itself, and an optimizer of its parameters."""
    with torch.device("meta"):
        model = Sundry()
    made = compiled(model, {"compute": "fx", **options_for(placement, folder, piece=PIECE, **others)})
    return made, model, torch.optim.AdamW(model.parameters(), lr=0.5)


def fill_scale(module: nn.Module) -> None:
    """Give a value to what has no initialiser."""
    if isinstance(module, Sundry):
        nn.init.ones_(module.scale)


def saved(folder: Path, placement: Placement = ALL_AWAY) -> tuple[Path, Trained]:
    """Train, and save; return the checkpoint, and what was trained."""
    trained = twins(folder, placement)
    return zinf_compile.save(folder / "saved", trained[0], trained[1], extra={"step": 2}, wait=True), trained


def left_on(folder: Path) -> int:
    """Return the bytes of files that are open in a folder, unlinked or not."""
    links = [Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sum(link.stat().st_size for link in links if link.exists() and str(folder) in os.readlink(link))


@pytest.mark.parametrize("compiled", [in_place, wrapped])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_it_goes_on_like_the_one_that_was_saved(placement: Placement, compiled: Callable[..., Any], tmp_path: Path) -> None:
    folder, (_, _, eager, other) = saved(tmp_path)
    made, model, optimizer = on_meta(tmp_path, placement, compiled=compiled)
    parameters = [id(p) for p in model.parameters()]
    assert zinf_compile.load(folder, made, optimizer) == {"step": 2}
    assert [id(p) for p in model.parameters()] == parameters
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    assert model.head.weight is model.embedding.weight
    compare((model, optimizer, eager, other))
    check_same((made, optimizer, eager, other), step=2, steps=2)


def test_in_tiles_with_the_optimizer_made_afterwards(tmp_path: Path) -> None:
    folder, (_, _, eager, other) = saved(tmp_path)
    made, model, _ = on_meta(tmp_path, ALL_AWAY, tile=128)
    assert zinf_compile.load(folder, made) == {"step": 2}
    assert any(p._zinf_unit.tiles for p in model.parameters())
    optimizer = adamw(model.parameters())
    zinf_compile.load(folder, made, optimizer)
    compare((model, optimizer, eager, other))


def test_onto_a_model_that_was_partitioned_with_values_of_its_own(tmp_path: Path) -> None:
    folder, (_, _, eager, other) = saved(tmp_path)
    made, model, optimizer = on_meta(tmp_path, ALL_AWAY)
    zinf_compile.partition(model, init=fill_scale, **options_for(ALL_AWAY, tmp_path, piece=PIECE))
    zinf_compile.load(folder, made, optimizer)
    check_same((model, optimizer, eager, other), step=2)


def damage(folder: Path, optimizer: Optimizer) -> Path:
    damaged = Path(shutil.copytree(folder, folder.parent.parent / "damaged" / folder.name))
    damage_a_state(damaged)
    return damaged


def change_class(folder: Path, optimizer: Optimizer) -> Path:
    optimizer.__class__ = torch.optim.Adam
    return folder


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (damage, CheckpointError, r"is damaged: the checksum of \S+ differs"),
        (change_class, CheckpointError, r"optimizer is a AdamW in the checkpoint, Adam is given"),
    ],
)
def test_an_error_leaves_it_on_meta(change: Callable[..., Path], error: type[Exception], said: str, tmp_path: Path) -> None:
    folder, (_, _, eager, other) = saved(tmp_path)
    drive = tmp_path / "drive"
    drive.mkdir()
    made, model, optimizer = on_meta(drive, ALL_AWAY)
    before = dict(model.state_dict())
    with pytest.raises(error, match=said):
        zinf_compile.load(change(folder, optimizer), made, optimizer)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert model.head.weight is model.embedding.weight
    assert before.keys() == model.state_dict().keys()
    assert not optimizer.state
    assert not left_on(drive), "what was made on the drive is given back"
    if change is damage:
        with pytest.raises(StepFailedError, match="ended in its middle"):
            optimizer.step()
    optimizer.__class__ = torch.optim.AdamW
    zinf_compile.load(folder, made, optimizer)
    check_same((model, optimizer, eager, other), step=2)


def test_what_is_not_known_before_the_first_call(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    with torch.device("meta"):
        model = Sundry()
    with pytest.raises(
        UnsupportedModelError, match=r"was not compiled.*give load\(\) what that returned.*zinf_compile\.partition"
    ):
        zinf_compile.load(folder, model)
    made = wrapped(model, {"compute": "fx"})
    with pytest.raises(UnsupportedModelError, match=r"was not compiled"):
        zinf_compile.load(folder, model)
    model.up.compile(backend="zero_infinity", options={"compute": "fx", "tile": 64})
    with pytest.raises(UnsupportedModelError, match=r"compiled with different options: call zinf_compile\.partition"):
        zinf_compile.load(folder, made)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_nothing_is_whole_in_memory(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 1024, bias=False))

    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    folder = zinf_compile.save(tmp_path / "saved", model, optimizer)
    with torch.device("meta"):
        fresh = build()
    its = torch.optim.AdamW(fresh.parameters())
    in_place(fresh, {**options_for(ALL_AWAY, tmp_path, piece=1 << 16), "tile": "1MiB"})
    zinf_compile.load(folder, fresh, its)
    (most,) = {account["peak"]["all"] for account in zinf_compile.stats(fresh)["memory"].values()}
    assert most < 8 << 20 < 16 << 20 == fresh[0].weight.nbytes, f"{most:,} bytes at most"
    torch.testing.assert_close(dict(zinf_compile.full_state_dict(fresh)), dict(model.state_dict()), rtol=0, atol=0)
    assert torch.equal(its.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_an_optimizer_whose_constructor_makes_states(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    folder = zinf_compile.save(tmp_path / "saved", model, optimizer)
    with torch.device("meta"):
        fresh = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    its = torch.optim.Adagrad(fresh.parameters())
    in_place(fresh, {"compute": "fx"})
    zinf_compile.load(folder, fresh, its)
    for each, adagrad in ((model, optimizer), (fresh, its)):
        each(torch.ones(2, 7)).square().sum().backward()
        adagrad.step()
    torch.testing.assert_close(dict(fresh.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(its.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)


class Shifted(nn.Module):
    """Adds a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + self.shift).square().mean()


class Filled(Shifted):
    """Fills it again."""

    def reset_parameters(self) -> None:
        self.shift.copy_(torch.arange(3.0))


def test_a_buffer_that_is_in_no_checkpoint(tmp_path: Path) -> None:
    whole = Shifted()
    folder = zinf_compile.save(tmp_path / "saved", whole)

    def compiled(kind: type[Shifted]) -> Any:
        with torch.device("meta"):
            model = kind()
        return in_place(model, {"compute": "fx", "params": "device"})

    plain = compiled(Shifted)
    with pytest.raises(UnsupportedModelError, match=r"gave shift a value; the model is on meta .* No checkpoint has"):
        zinf_compile.load(folder, plain)
    plain.shift = torch.arange(3.0)
    for model in (plain, compiled(Filled)):
        zinf_compile.load(folder, model)
        assert torch.equal(model(torch.ones(2, 3)), whole(torch.ones(2, 3)))
