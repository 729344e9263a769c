"""Closures in which a model is compiled and partitioned, at the optimizer's first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_closures
import schedulefree
import torch
from models import Mlp, vectors
from optimizers import OPTIMIZERS, SignMomentum, assert_same_states
from ranks import run_ranks
from tier_twins import compare
from tiers import Placement, compiled, options_for, sundry, words
from torch import nn
from torch.optim import Optimizer
from training import assert_same, assert_same_models, in_place, twins

import zinf_compile
from zinf_compile.errors import UnsupportedOptimizerError

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

PLACEMENTS: list[Placement] = [
    ("nvme", "nvme", "nvme"), ("device", "device", "nvme"), ("nvme", "device", "device"), ("device", "device", "device"),
]  # fmt: skip


class Twice(torch.optim.SGD):
    """Asks its closure twice, the second time after a first update, and calls the step of its base class."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        super().step(closure)
        return loss


def step_with_closure(model: nn.Module, optimizer: Optimizer, number: int) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(words(number, 0))
        loss.backward()
        return loss

    return optimizer.step(closure).item()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("adamw", PLACEMENTS[0]),
        ("third_party", PLACEMENTS[1]),
        *(pytest.param(n, p, marks=pytest.mark.thorough) for n in ("sgd", "adamw", "third_party") for p in PLACEMENTS),
    ],
)
def test_a_first_step_with_a_closure(name: str, placement: Placement, tmp_path: Path) -> None:
    ours, eager = sundry(), sundry()
    compiled(ours, options_for(placement, tmp_path))
    first, second = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](eager.parameters())
    for number in range(3):
        assert step_with_closure(ours, first, number) == step_with_closure(eager, second, number)
    compare((ours, first, eager, second))


def test_a_closure_that_is_called_twice_and_one_that_fails_first() -> None:
    eager, ours = twins(Mlp)
    in_place(ours)
    sides = [(model, Twice(model.parameters(), lr=0.1, momentum=0.5)) for model in (eager, ours)]
    for fails in (True, False, False):
        for model, optimizer in sides:

            def closure(model: Any = model, optimizer: Any = optimizer, fails: bool = fails) -> Any:
                optimizer.zero_grad()
                loss = model(*vectors(0))
                loss.backward()
                if fails:
                    raise ArithmeticError("stumbled")
                return loss

            if fails:
                with pytest.raises(ArithmeticError, match="stumbled"):
                    optimizer.step(closure)
            else:
                optimizer.step(closure)
        assert_same_models(eager, ours)
    assert_same_states(*(optimizer for _, optimizer in sides))


class Halves(nn.Module):
    """Its second layer is used from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x).tanh()
        return (self.second(x) if both else x).square().mean()


@pytest.mark.parametrize("on_nvme", [False, True])
def test_a_closure_that_partitions_more_of_the_model(on_nvme: bool, tmp_path: Path) -> None:
    eager, ours = twins(Halves)
    compiled(ours, options_for(("nvme",) * 3, tmp_path) if on_nvme else {})
    sides = [(model, SignMomentum(model.parameters())) for model in (eager, ours)]
    for number in range(4):
        losses = []
        for model, optimizer in sides:

            def closure(model: Any = model, optimizer: Any = optimizer, number: int = number) -> Any:
                optimizer.zero_grad()
                loss = model(torch.full((2, 7), 0.1 * (number + 1)), number > 0)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).detach())
        assert_same("loss", *losses)
    whole = zinf_compile.full_state_dict(ours)
    for name, value in eager.state_dict().items():
        assert_same(name, value, whole[name])
    assert_same_states(*(optimizer for _, optimizer in sides))


def test_an_optimizer_that_is_refused_in_its_first_closure() -> None:
    _, ours = twins(Mlp)
    in_place(ours)
    before = {name: value.clone() for name, value in ours.state_dict().items()}

    def closure() -> Any:
        loss = ours(*vectors(0))
        loss.backward()
        return loss

    with pytest.raises(UnsupportedOptimizerError, match=r"LBFGS doesn't update element by element .*'_params'"):
        torch.optim.LBFGS(ours.parameters()).step(closure)
    for name, value in ours.state_dict().items():
        assert_same(name, before[name], value)


def test_an_optimizer_of_another_model_is_left_alone() -> None:
    """The hooks are of the whole process: what has nothing to do with partitioned parameters trains as ever."""
    eager = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(eager.parameters(), line_search_fn="strong_wolfe")
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(eager(x), y)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]  # type: ignore[union-attr]
    assert losses[-1] <= losses[0]
    assert optimizer.state[next(iter(eager.parameters()))]["n_iter"] > 0


def test_ranks_take_their_first_step_with_a_closure(tmp_path: Path) -> None:
    """Also states that are changed and taken out between steps, and an optimizer whose `eval` is refused."""
    run_ranks(rank_closures.train, 2, str(tmp_path))


SCHEDULE_FREE: dict[str, Callable[..., Any]] = {
    "AdamWScheduleFree": lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=0.02, warmup_steps=2),
    "SGDScheduleFree": lambda parameters: schedulefree.SGDScheduleFree(parameters, lr=0.5),
}


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("AdamWScheduleFree", PLACEMENTS[1]),
        ("AdamWScheduleFree", PLACEMENTS[0]),
        *(pytest.param(n, p, marks=pytest.mark.thorough) for n in SCHEDULE_FREE for p in (*PLACEMENTS, PLACEMENTS[3])),
    ],
)
def test_optimizers_whose_eval_changes_the_parameters(name: str, placement: Placement, tmp_path: Path) -> None:
    ours, eager = sundry(), sundry()
    compiled(ours, options_for(placement, tmp_path))
    first, second = (SCHEDULE_FREE[name](model.parameters()) for model in (ours, eager))

    def in_mode(mode: str) -> None:
        for optimizer in (first, second):
            getattr(optimizer, mode)()

    for number in range(3):
        in_mode("train")
        for step in range(2):
            assert step_with_closure(ours, first, 2 * number + step) == step_with_closure(eager, second, 2 * number + step)
        in_mode("eval")
        assert ours(words(50, 0)).item() == eager(words(50, 0)).item()
        compare((ours, first, eager, second))
