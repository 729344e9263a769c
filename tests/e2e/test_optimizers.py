"""Unmodified optimizers on partitioned parameters, on one process: bitwise eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import CASES, Mlp, TiedWords, loss_of, tokens, vectors
from optimizers import OPTIMIZERS, assert_same_states
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from training import BACKEND, adamw, assert_same, in_place, plain_step, train_both, train_step_on, twins

import zinf_compile
from zinf_compile.optim import fused_kernels

pytestmark = pytest.mark.keeps_graphs


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("made", ["before", "after"])
def test_optimizer_made_before_or_after_the_first_compiled_call(name: str, made: str) -> None:
    eager, ours = twins(TiedWords)
    in_place(ours)
    if made == "after":
        with torch.no_grad():
            ours(*tokens(99))
    sides = [(model, OPTIMIZERS[name](model.parameters())) for model in (eager, ours)]
    for number in range(4):
        train_step_on(sides, [eager, ours], plain_step, tokens(number), number)
    assert_same_states(*(optimizer for _, optimizer in sides))


@pytest.mark.parametrize("name", ["sgd_momentum", "adam", "adamw_foreach", "adamw_fused", "rmsprop", "adagrad", "third_party"])
def test_optimizer_on_parameters_of_odd_shapes(name: str) -> None:
    train_both(CASES["odd_shapes"], optimizer=OPTIMIZERS[name], steps=4)


def test_parameter_groups_with_their_own_settings_and_one_added_later() -> None:
    eager, ours = twins(Mlp)
    in_place(ours)
    sides = []
    for model in (eager, ours):
        groups = [{"params": model.first.parameters(), "lr": 0.1}, {"params": model.norm.parameters(), "weight_decay": 0.0}]
        sides.append((model, torch.optim.AdamW(groups, lr=0.01, fused=True)))
    for number in range(4):
        if number == 2:
            for model, optimizer in sides:
                optimizer.add_param_group({"params": model.second.parameters(), "lr": 0.02})
        train_step_on(sides, [eager, ours], plain_step, vectors(number), number)
    assert_same_states(*(optimizer for _, optimizer in sides))


def test_two_optimizers_share_a_model() -> None:
    eager, ours = twins(Mlp)
    in_place(ours)
    sides: list[tuple[Any, Any]] = []
    for model in (eager, ours):
        sides.append((model, (torch.optim.SGD(model.first.parameters(), lr=0.1), adamw(model.second.parameters()))))

    def step(model: Any, optimizers: Any, batch: tuple[Any, ...]) -> torch.Tensor:
        loss: torch.Tensor = model(*batch)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    for number in range(3):
        train_step_on(sides, [eager, ours], step, vectors(number), number)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=3),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers(name: str) -> None:
    schedules: dict[int, Any] = {}

    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        if id(optimizer) not in schedules:
            schedules[id(optimizer)] = SCHEDULERS[name](optimizer)
        loss = plain_step(model, optimizer, batch)
        schedules[id(optimizer)].step()
        return loss

    train_both(CASES["mlp"], step=step, steps=4)
    first, second = schedules.values()
    assert first.get_last_lr() == second.get_last_lr()
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "third_party"])
@pytest.mark.parametrize("keyword", [False, True])
def test_closures(name: str, keyword: bool) -> None:
    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(*batch))
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert isinstance(loss, torch.Tensor)
        return loss

    train_both(CASES["mlp"], optimizer=OPTIMIZERS[name], step=step, steps=4)


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw_fused"])
def test_gradients_that_a_closure_zeroes_are_let_go_of_before_it_makes_others(name: str) -> None:
    model = in_place(Mlp())
    with torch.no_grad():
        model(*vectors(99))
    optimizer = OPTIMIZERS[name](model.parameters())
    held: list[int] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        held.append(zinf_compile.memory(model)["now"]["grads"])
        loss = loss_of(model(*vectors(len(held))))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert held == [0] * 3


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_zero_grad_and_accumulation(set_to_none: bool, zero: str) -> None:
    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        (model if zero == "model" else optimizer).zero_grad(set_to_none=set_to_none)
        x, y, even = batch
        for part, used in ((slice(0, 1), even), (slice(1, 3), True)):
            loss: torch.Tensor = model(x[part], y[part], used) / 2
            loss.backward()
        optimizer.step()
        return loss

    train_both(CASES["branches"], step=step, steps=4, whole={"never.weight", "never.bias"})


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_clip_grad_norm(foreach: bool | None, order: float) -> None:
    norms = []

    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        loss = loss_of(model(*batch))
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=order, foreach=foreach))
        optimizer.step()
        return loss

    train_both(CASES["tied"], step=step)
    for eager, ours in zip(norms[::2], norms[1::2], strict=True):
        assert_same("norm", eager, ours)
        assert eager > 0.05


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clip_grad_value(foreach: bool | None) -> None:
    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        loss = loss_of(model(*batch))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        optimizer.step()
        return loss

    train_both(CASES["used_twice"], step=step)


def test_grad_scaler_skips_the_step_of_an_infinite_gradient() -> None:
    scales: dict[int, list[float]] = {}
    scalers: dict[int, torch.amp.GradScaler] = {}

    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        scaler = scalers.setdefault(id(optimizer), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2))
        x, y = batch
        infinite = len(scales.get(id(optimizer), ())) == 1
        optimizer.zero_grad()
        loss: torch.Tensor = model(x * float("inf") if infinite else x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.setdefault(id(optimizer), []).append(scaler.get_scale())
        return loss if not infinite else torch.zeros(())

    train_both(CASES["used_twice"], optimizer=OPTIMIZERS["sgd_momentum"], step=step, steps=5)
    eager, ours = scales.values()
    assert eager == ours
    assert eager[1] == 32.0, "the infinite step didn't halve the scale"


def test_grad_scaler_with_a_fused_optimizer() -> None:
    scalers: dict[int, torch.amp.GradScaler] = {}

    def step(model: Any, optimizer: Optimizer, batch: tuple[Any, ...]) -> torch.Tensor:
        scaler = scalers.setdefault(id(optimizer), torch.amp.GradScaler("cpu", init_scale=64.0))
        optimizer.zero_grad()
        loss: torch.Tensor = model(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    train_both(CASES["mlp"], optimizer=OPTIMIZERS["adamw_fused"], step=step)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("flags", [{}, {"foreach": False}, {"foreach": True}, {"fused": False}, {"fused": True}], ids=str)
def test_adam_is_fused_where_that_is_left_open(kind: type[torch.optim.Optimizer], flags: dict[str, bool]) -> None:
    eager, ours = twins(TiedWords)
    in_place(ours)
    reference = flags or {"fused": True}
    sides = [(eager, kind(eager.parameters(), **reference)), (ours, kind(ours.parameters(), **flags))]  # type: ignore[call-arg]
    for number in range(3):
        train_step_on(sides, [eager, ours], plain_step, tokens(number), number)
    sides[0][1].param_groups[0]["fused"] = flags.get("fused")
    assert_same_states(sides[0][1], sides[1][1])
    # acc_events: else PyTorch 2.11 warns that later cycles would drop the events of this one
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        sides[1][1].step()
    kernels = [event.key for event in profile.key_averages() if "fused_adam" in event.key]
    assert bool(kernels) == ("fused" in reference and reference["fused"])
    assert sides[1][1].param_groups[0]["fused"] is flags.get("fused"), "the user's settings stay as they are"


def test_the_log_says_once_whose_bits_an_open_choice_has(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_kernels, "_logged", [])
    with caplog.at_level("INFO", logger="zinf_compile"):
        for settings in ({"foreach": False}, {"fused": True}, {}, {}):
            model = Mlp()
            model.compile(backend=BACKEND)
            optimizer = torch.optim.AdamW(model.parameters(), **settings)
            loss_of(model(*vectors(0))).backward()
            optimizer.step()
    assert [record.message.split(":")[0] for record in caplog.records if "fused" in record.message] == [
        "AdamW with `fused` left open is updated by PyTorch's fused kernel, here as anywhere on the CPU"
    ]
