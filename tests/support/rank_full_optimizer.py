"""Optimizer states that some ranks save whole, and others load."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import OddShapes, generator, vectors
from rank_tile_states import Tall, assert_same_values
from tiers import in_pieces
from torch import nn
from torch.optim import Optimizer
from training import BACKEND, adamw

import zinf_compile
from zinf_compile.errors import RankMismatchError, StoreWarning, UnsupportedOptimizerError, ZinfError

SAVED, TRAINED = "saved.pt", "trained.pt"
ALL_ON_DRIVE = dict.fromkeys(("params", "grads", "optimizer"), "nvme")


def odd(step: int) -> tuple[torch.Tensor, ...]:
    """Return the same batch for all ranks."""
    return vectors(step)


def tall(step: int) -> tuple[torch.Tensor, ...]:
    """Return the same batch for all ranks."""
    return (torch.randn(8, 16, generator=generator(step)),)


def frozen() -> nn.Module:
    """Return a model of which one parameter has no states."""
    model = Tall()
    model.down.bias.requires_grad_(requires_grad=False)
    return model


def short() -> nn.Module:
    """Return a model in bf16."""
    return Tall().to(torch.bfloat16)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, ...]]]] = {
    "odd": (OddShapes, odd),
    "tall": (Tall, tall),
    "frozen": (frozen, tall),
    "short": (short, lambda step: tuple(value.to(torch.bfloat16) for value in tall(step))),
}


class Run:
    """A model, a parameter beside it that no graph uses, and an optimizer of both in two groups."""

    def __init__(self, name: str, options: dict[str, Any] | None) -> None:
        torch.compiler.reset()
        torch.manual_seed(3)
        build, self.batch = MODELS[name]
        self.model, self.beside = build(), nn.Parameter(torch.ones(3))
        groups = [{"params": list(self.model.parameters())}, {"params": [self.beside], "lr": 0.2}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
        if options is not None:
            self.model.compile(backend=BACKEND, options=options)

    def train(self, *steps: int) -> None:
        """Take some steps."""
        for step in steps:
            self.optimizer.zero_grad()
            self.model(*self.batch(step)).backward()
            self.beside.grad = torch.full_like(self.beside, step + 1.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of the parameter beside the model, whose gradients are local
                self.optimizer.step()

    def save(self) -> dict[str, Any]:
        """Return the whole state, on rank 0."""
        return {
            "model": zinf_compile.full_state_dict(self.model),
            "optimizer": zinf_compile.full_optimizer_state_dict(self.optimizer),
        }

    def load(self, saved: dict[str, Any] | None) -> None:
        """Load it; ranks other than 0 are given nothing."""
        with torch.no_grad():
            self.model(*self.batch(0))
        zinf_compile.load_full_state_dict(self.model, saved and saved["model"])
        zinf_compile.load_full_optimizer_state_dict(self.optimizer, saved and saved["optimizer"])


def assert_same_optimizer(
    expected: dict[str, Any], found: dict[str, Any], compare: Callable[[Any, Any, object], None] = assert_same_values
) -> None:
    """Compare two whole state dicts; values by default bit by bit."""
    assert expected["param_groups"] == found["param_groups"]
    assert expected["state"].keys() == found["state"].keys()
    for index, state in expected["state"].items():
        assert state.keys() == found["state"][index].keys()
        compare(state, found["state"][index], index)


def placed(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return options with a place for what goes to a drive, and pieces so small that chunks end within parameters."""
    return {**options, **in_pieces(96)} | ({"nvme": folder} if "nvme" in options.values() else {})


def save(rank: int, size: int, folder: str, name: str, options: dict[str, Any]) -> None:
    """Train and save."""
    warnings.filterwarnings("ignore", category=StoreWarning)
    run = Run(name, placed(options, folder))
    run.train(0, 1)
    saved = run.save()
    if rank == 0:
        torch.save(saved, Path(folder) / SAVED)
    else:
        assert saved == {"model": {}, "optimizer": {}}


def load(rank: int, size: int, folder: str, name: str, options: dict[str, Any]) -> None:
    """Load on rank 0's word alone, save that again, train on and save what that gives."""
    warnings.filterwarnings("ignore", category=StoreWarning)
    run = Run(name, placed(options, folder))
    saved = torch.load(Path(folder) / SAVED, weights_only=True) if rank == 0 else None
    run.load(copy.deepcopy(saved))
    again = run.save()
    if saved is not None:
        assert_same_optimizer(saved["optimizer"], again["optimizer"])
        assert_same_values(saved["model"], again["model"], "weights")
    run.train(2, 3)
    trained = run.save()
    if rank == 0:
        torch.save(trained, Path(folder) / TRAINED)


def bad_input(rank: int, size: int) -> list[str]:
    """Load what doesn't fit; return what is said of it."""
    run = Run("tall", {})
    run.train(0)
    own = run.optimizer.state_dict()
    good = run.save()["optimizer"]
    cases: list[Any] = [None, {}, {"state": 3}, {}, None, good]  # of these rank 0 alone is asked
    if rank == 0:
        wrong = copy.deepcopy(good)
        wrong["state"][0]["exp_avg"] = torch.zeros(16, 64)
        wrong["state"][1]["exp_avg_sq"] = torch.zeros(7)
        groups = [{**good["param_groups"][0], "params": [0, 1]}, good["param_groups"][1]]
        cases = [None, {}, {"state": {}}, {**good, "param_groups": groups}, wrong, own]
        cases += [{**good, "param_groups": [3, 4]}, {**good, "k": lambda: None}]
    else:
        cases += [{}, {}]
    said = []
    for case in cases:
        with pytest.raises((ZinfError, TypeError, AttributeError)) as error:
            zinf_compile.load_full_optimizer_state_dict(run.optimizer, case)
        said.append(str(error.value))
    now = run.save()["optimizer"]
    if rank == 0:
        assert_same_optimizer(good, now)
    said.append(_failing_on_one(run, rank))
    said.append(_other_states(run, rank))
    return said


def _failing_on_one(run: Run, rank: int) -> str:
    """Let `state_dict` fail on rank 1: both say so, neither waits for the other."""

    def fail(optimizer: Optimizer) -> None:
        if rank == 1:
            raise ArithmeticError("mine")

    hook = run.optimizer.register_state_dict_pre_hook(fail)
    with pytest.raises(ArithmeticError if rank == 1 else RankMismatchError) as error:
        zinf_compile.full_optimizer_state_dict(run.optimizer)
    hook.remove()
    return str(error.value)


def _other_states(run: Run, rank: int) -> str:
    """Save what only one rank has."""
    if rank == 1:
        del run.optimizer.state[run.model.get_parameter("up.weight")]
    with pytest.raises(RankMismatchError) as error:
        zinf_compile.full_optimizer_state_dict(run.optimizer)
    return str(error.value)


def nested(rank: int, size: int) -> str:
    """Save states that are lists of tensors."""
    run = Run("tall", {})
    run.train(0)
    for state in run.optimizer.state.values():
        state["history"] = [state["exp_avg"].clone()]
    with pytest.raises(UnsupportedOptimizerError) as error:
        run.save()
    return str(error.value)


def inside_gathered(rank: int, size: int) -> None:
    """Save and load while the model is whole: states are this rank's as ever."""
    run = Run("tall", {"tile": 1024})
    run.train(0)
    expected = zinf_compile.full_optimizer_state_dict(run.optimizer)
    with zinf_compile.gathered(run.model):
        found = zinf_compile.full_optimizer_state_dict(run.optimizer)
        zinf_compile.load_full_optimizer_state_dict(run.optimizer, found)
    again = zinf_compile.full_optimizer_state_dict(run.optimizer)
    if rank == 0:
        assert_same_optimizer(expected, found)
        assert_same_optimizer(expected, again)
    else:
        assert expected == found == again == {}


def before_the_first_step(rank: int, size: int) -> None:
    """There are no states yet; and without a partitioned parameter each rank saves and loads by itself."""
    run = Run("tall", {})
    with torch.no_grad():
        run.model(*run.batch(0))
    empty = zinf_compile.full_optimizer_state_dict(run.optimizer)
    assert empty == ({} if rank else run.optimizer.state_dict())
    zinf_compile.load_full_optimizer_state_dict(run.optimizer, empty if rank == 0 else None)
    plain = nn.Linear(3, 2)
    optimizer = adamw(plain.parameters())
    plain(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = zinf_compile.full_optimizer_state_dict(optimizer)
    assert_same_optimizer(optimizer.state_dict(), saved)
    zinf_compile.load_full_optimizer_state_dict(optimizer, saved)
    with pytest.raises(UnsupportedOptimizerError, match="nothing is partitioned: then each rank needs one"):
        zinf_compile.load_full_optimizer_state_dict(optimizer, None)
    dist.barrier()
