"""What users do with a model, with its states anywhere: each function does it to an eager model and its compiled twin.

Both train on `places.place()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from models import CASES, Blocks, Mlp, TiedWords, tokens, vectors
from optimizers import OPTIMIZERS
from places import place
from tiers import Meter, context_of
from torch import nn
from torch.optim import Optimizer
from training import assert_same, plain_step
from twin_models import Twins
from versions import guards_requires_grad

import zinf_compile
from zinf_compile.errors import PartitionedParameterError

Compile = Callable[[nn.Module], nn.Module]
"""Compiles a model with its states where a test wants them."""


def autocast(away: Compile) -> None:
    pair = Twins(TiedWords, away)

    def step(model: nn.Module, optimizer: Optimizer) -> Any:
        optimizer.zero_grad()
        with torch.autocast(place().type, torch.bfloat16):
            loss = model(*tokens(0))
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(3):
        pair.each(step)


def dynamic_shapes(away: Compile) -> None:
    pair = Twins(TiedWords, away)
    torch.compiler.reset()
    for rows in (3, 5, 2, 7):
        pair.each(lambda model, optimizer, rows=rows: plain_step(model, optimizer, tokens(rows, rows=rows, length=rows + 4)))  # type: ignore[misc]
    torch.compiler.reset()  # for other tests, sizes stay the same


def several_graphs(name: str, away: Compile) -> None:
    case = CASES[name]
    pair = Twins(case.build, away)
    for step in range(4):
        pair.each(lambda model, optimizer, step=step: plain_step(model, optimizer, case.batch(step, 0)))  # type: ignore[misc]


def odd_shapes(away: Compile) -> None:
    pair = Twins(CASES["odd_shapes"].build, away)
    for step in range(3):
        pair.each(lambda model, optimizer, step=step: plain_step(model, optimizer, vectors(step)))  # type: ignore[misc]


def two_models(away: Compile) -> None:
    first, second = Twins(Mlp, away), Twins(Blocks, away)
    for step in range(3):
        for pair in (first, second):
            pair.each(lambda model, optimizer, step=step: plain_step(model, optimizer, vectors(step)))  # type: ignore[misc]


def hooks(away: Compile) -> None:
    pair = Twins(Mlp, away)
    called: list[str] = []

    def after(parameter: torch.Tensor) -> None:
        called.append("after")
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    for model in pair.models:
        model.first.weight.register_hook(lambda grad: grad * 2)
        model.second.weight.register_post_accumulate_grad_hook(after)
    for step in range(3):
        pair.each(lambda model, optimizer, step=step: plain_step(model, optimizer, vectors(step)))  # type: ignore[misc]
    assert len(called) == 6


def scaler(away: Compile) -> None:
    pair = Twins(Mlp, away)
    scalers = {id(model): torch.amp.GradScaler(place().type, init_scale=2.0**10, growth_interval=2) for model in pair.models}

    def step(number: int) -> Callable[[nn.Module, Optimizer], Any]:
        def run(model: nn.Module, optimizer: Optimizer) -> Any:
            scaler = scalers[id(model)]
            optimizer.zero_grad()
            x, y = vectors(number)
            loss = model(x * (float("inf") if number == 2 else 1.0), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            return scaler.get_scale()

        return run

    for number in range(5):
        pair.each(step(number))


def what_is_done_to_gradients(away: Compile) -> None:
    """Zeroed in place, clipped by value, scaled, set by the user, taken away."""
    pair = Twins(Mlp, away)

    def step(model: Any, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        for number in range(2):
            model(*vectors(number)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        model.first.weight.grad.mul_(3.0)
        model.second.weight.grad = torch.ones(model.second.weight.shape, device=place())
        model.norm.bias.grad = None
        nn.utils.clip_grad_norm_(model.parameters(), 0.3, norm_type=float("inf"))
        optimizer.step()

    for _ in range(3):
        pair.each(step)


def a_gradient_takes_part_in_arithmetic(away: Compile) -> None:
    """What it only lends its values to works; what would change a copy of it is refused."""
    pair = Twins(Mlp, away)
    for model in pair.models:
        model(*vectors(0)).backward()
    eager, ours = (model.first.weight.grad for model in pair.models)
    assert_same("sum", eager.sum(), ours.sum())
    assert_same(
        "product", eager @ torch.ones(eager.shape[1], 2, device=place()), ours @ torch.ones(eager.shape[1], 2, device=place())
    )
    for act in (ours.normal_, lambda: ours[0]):
        with pytest.raises(PartitionedParameterError, match="the shards are off the device"):
            act()


def _learn(modules: Sequence[nn.Module], trained: bool) -> None:
    """Freeze or thaw; where PyTorch would run the graph of before such a change, do what our error then says."""
    for module in modules:
        module.requires_grad_(trained)
    if not guards_requires_grad:
        torch.compiler.reset()


def parameters_freeze_and_thaw(away: Compile) -> None:
    pair = Twins(Mlp, away)
    for number, trained in enumerate([True, False, True, False, True]):
        _learn([model.first for model in pair.models], trained)
        pair.each(lambda model, optimizer, n=number: plain_step(model, optimizer, vectors(n)))  # type: ignore[misc]


def parameters_frozen_at_first(away: Compile) -> None:
    pair = Twins(CASES["frozen"].build, away)
    for number in range(4):
        if number == 2:
            _learn(pair.models, trained=True)
        pair.each(lambda model, optimizer, n=number: plain_step(model, optimizer, vectors(n)))  # type: ignore[misc]


def whole_values_are_read_and_written(away: Compile) -> None:
    pair = Twins(TiedWords, away)
    pair.each(lambda model, optimizer: plain_step(model, optimizer, tokens(0)))
    eager, ours = pair.models
    with zinf_compile.gathered(ours, write=True), torch.no_grad():
        for model in pair.models:
            model.block.up.weight.mul_(0.5)
            model.embedding.weight[3] = 1.0
    pair.each(lambda model, optimizer: plain_step(model, optimizer, tokens(1)))
    saved = copy.deepcopy(eager.state_dict())
    pair.each(lambda model, optimizer: plain_step(model, optimizer, tokens(2)))
    eager.load_state_dict(saved)
    zinf_compile.load_full_state_dict(ours, saved)
    pair.each(lambda model, optimizer: plain_step(model, optimizer, tokens(3)))


def an_eager_run_goes_on_and_back(name: str, away: Compile) -> None:
    pair = Twins(TiedWords, away, OPTIMIZERS[name])
    for number in range(3):
        pair.each(lambda model, optimizer, n=number: plain_step(model, optimizer, tokens(n)))  # type: ignore[misc]
    eager, _ = pair.models
    other = OPTIMIZERS[name](eager.parameters())
    other.load_state_dict(copy.deepcopy(pair.optimizers[1].state_dict()))
    pair.optimizers[1].load_state_dict(copy.deepcopy(pair.optimizers[0].state_dict()))
    pair.optimizers[0] = other
    pair.each(lambda model, optimizer: plain_step(model, optimizer, tokens(3)))


def closures(away: Compile) -> None:
    pair = Twins(TiedWords, away)

    def step(model: nn.Module, optimizer: Optimizer) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(*tokens(0))
            loss.backward()
            return loss

        return optimizer.step(closure)

    pair.each(lambda model, optimizer: plain_step(model, optimizer, tokens(0)))
    for _ in range(3):
        pair.each(step)


def inference_alone_takes_no_room_for_gradients(away: Compile) -> None:
    """Nor does it write anything; also between two micro-batches."""
    pair = Twins(TiedWords, away)

    def infer(model: nn.Module, _: Optimizer) -> torch.Tensor:
        with torch.no_grad():
            return model(*tokens(9))

    pair.each(infer)
    meter = Meter(None)
    meter.read(pair.models[1])
    ledger = context_of(pair.models[1]).memory.ledger.now()
    assert ledger["grads"] == 0
    for _ in range(2):
        with torch.no_grad():
            pair.models[1](*tokens(9))
    assert meter.read(pair.models[1]).written == 0

    def step(model: nn.Module, optimizer: Optimizer) -> Any:
        optimizer.zero_grad()
        for number in range(2):
            model(*tokens(number)).backward()
            model.eval()
            loss = infer(model, optimizer)
            model.train()
        optimizer.step()
        return loss

    for _ in range(3):
        pair.each(step)


GRAPHS = ("breaks_inside_unrolled_blocks", "breaks_inside_blocks", "branches", "checkpoint", "used_twice")
GO_ON = ("adamw", "sgd", "sgd_momentum", "rmsprop", "third_party")

FEATURES: dict[str, Callable[[Compile], None]] = {
    "autocast": autocast,
    "dynamic shapes": dynamic_shapes,
    **{f"several graphs: {name}": partial(several_graphs, name) for name in GRAPHS},
    "odd shapes": odd_shapes,
    "two models": two_models,
    "hooks": hooks,
    "scaler": scaler,
    "what is done to gradients": what_is_done_to_gradients,
    "a gradient takes part in arithmetic": a_gradient_takes_part_in_arithmetic,
    "parameters freeze and thaw": parameters_freeze_and_thaw,
    "parameters frozen at first": parameters_frozen_at_first,
    "whole values are read and written": whole_values_are_read_and_written,
    **{f"an eager run goes on and back: {name}": partial(an_eager_run_goes_on_and_back, name) for name in GO_ON},
    "closures": closures,
    "inference alone takes no room for gradients": inference_alone_takes_no_room_for_gradients,
}
