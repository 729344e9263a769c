"""An optimizer's state at any time: saved, loaded, and after an exception inside `step`."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import OddShapes, TiedWords, tokens, vectors
from optimizers import OPTIMIZERS, assert_same_states
from torch import nn
from torch.optim import Optimizer
from training import adamw, assert_same_models, in_place, plain_step, train_step_on, twins
from twin_models import Twins

STATEFUL = ["sgd_momentum", "adam_amsgrad", "adamw_fused", "rmsprop", "adagrad", "nadam", "third_party"]


pytestmark = pytest.mark.keeps_graphs


@pytest.mark.parametrize("name", STATEFUL)
def test_state_dict_before_between_and_after_steps(name: str) -> None:
    sides, models = both(TiedWords, OPTIMIZERS[name])
    (_, eager), (_, ours) = sides
    assert_same_states(eager, ours)
    for number in range(3):
        train_step_on(sides, models, plain_step, tokens(number), number)
        assert_same_states(eager, ours)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("build", [TiedWords, OddShapes])
def test_an_eager_run_goes_on_compiled(name: str, build: Callable[[], nn.Module]) -> None:
    batch = tokens if build is TiedWords else vectors
    eager, ours = twins(build)
    first = OPTIMIZERS[name](eager.parameters())
    for number in range(2):
        plain_step(eager, first, batch(number))
    ours.load_state_dict(eager.state_dict())
    second = OPTIMIZERS[name](in_place(ours).parameters())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    first.zero_grad()
    sides = [(eager, first), (ours, second)]
    for number in range(2, 5):
        train_step_on(sides, [eager, ours], plain_step, batch(number), number)
    assert_same_states(first, second)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("build", [TiedWords, OddShapes])
def test_a_compiled_run_goes_on_eager_from_a_file(name: str, build: Callable[[], nn.Module]) -> None:
    batch = tokens if build is TiedWords else vectors
    sides, models = both(build, OPTIMIZERS[name])
    for number in range(2):
        train_step_on(sides, models, plain_step, batch(number), number)
    file = io.BytesIO()
    torch.save({"model": models[1].state_dict(), "optimizer": sides[1][1].state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, _ = twins(build)
    resumed.load_state_dict(saved["model"])
    optimizer = OPTIMIZERS[name](resumed.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    for number in range(2, 5):
        train_step_on([sides[0], (resumed, optimizer)], [models[0], resumed], plain_step, batch(number), number)
    assert_same_states(sides[0][1], optimizer)


def test_state_loaded_between_steps_takes_effect() -> None:
    sides, models = both(TiedWords, adamw)
    train_step_on(sides, models, plain_step, tokens(0), 0)
    kept = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in sides]
    train_step_on(sides, models, plain_step, tokens(1), 1)
    for (_, optimizer), state in zip(sides, kept, strict=True):
        optimizer.load_state_dict(state)
    for number in range(2, 5):
        train_step_on(sides, models, plain_step, tokens(number), number)
    assert_same_states(*(optimizer for _, optimizer in sides))


class Stumbling(torch.optim.SGD):
    """Raises in the middle of a step, when told to."""

    stumbles = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        if self.stumbles:
            raise ArithmeticError("stumbled")
        return super().step(closure)


def test_an_exception_of_the_optimizer_leaves_everything_usable() -> None:
    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        assert isinstance(optimizer, Stumbling)
        optimizer.zero_grad()
        loss: torch.Tensor = model(*batch)
        loss.backward()
        if optimizer.state:
            optimizer.stumbles = True
            with pytest.raises(ArithmeticError, match="stumbled"):
                optimizer.step()
            optimizer.stumbles = False
        optimizer.step()
        return loss

    sides, models = both(TiedWords, lambda parameters: Stumbling(parameters, lr=0.1, momentum=0.9))
    for number in range(3):
        train_step_on(sides, models, step, tokens(number), number)
        assert_same_states(*(optimizer for _, optimizer in sides))


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "third_party"])
def test_an_exception_of_a_closure_leaves_everything_usable(name: str) -> None:
    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        def closure(*, fails: bool = False) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(*batch)
            loss.backward()
            if fails:
                raise ArithmeticError("stumbled")
            return loss

        with pytest.raises(ArithmeticError, match="stumbled"):
            optimizer.step(lambda: closure(fails=True))
        loss = optimizer.step(closure)
        assert isinstance(loss, torch.Tensor)
        return loss

    sides, models = both(TiedWords, OPTIMIZERS[name])
    for number in range(3):
        train_step_on(sides, models, step, tokens(number), number)
        assert_same_states(*(optimizer for _, optimizer in sides))


def test_an_exception_halfway_keeps_what_the_optimizer_had_done() -> None:
    """As in eager PyTorch: parameters in front of the failing one are updated, the others are not; state_dict() works."""
    sides, models = both(TiedWords, partial(torch.optim.AdamW, foreach=False))
    train_step_on(sides, models, plain_step, tokens(0), 0)
    for model, optimizer in sides:
        optimizer.zero_grad()
        model(*tokens(1)).backward()
        last = optimizer.param_groups[0]["params"][-1]
        optimizer.state[last]["exp_avg"], kept = None, optimizer.state[last]["exp_avg"]
        with pytest.raises(AttributeError, match="lerp_"):
            optimizer.step()
        optimizer.state[last]["exp_avg"] = kept
    assert_same_models(*models, where="after the failed step")
    for number in range(2, 4):
        train_step_on(sides, models, plain_step, tokens(number), number)
    assert_same_states(*(optimizer for _, optimizer in sides))


def both(build: Callable[[], nn.Module], make: Callable[..., Optimizer]) -> tuple[list[tuple[Any, Optimizer]], list[nn.Module]]:
    """Return both sides with their optimizers, and the two models."""
    trained = Twins(build, make=make)
    return trained.sides, [*trained.models]
