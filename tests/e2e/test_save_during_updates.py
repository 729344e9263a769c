"""Saves that begin while a step is still updating what it has deferred: they have the values after it, and don't wait for it."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from held_saves import held_saves
from held_updates import held_updates
from same_leaves import assert_equal
from saved_updates import expected_in, is_updating, loaded, saved_during_updates, step
from small_training import Training
from torch import nn
from torch.optim import Optimizer
from training import BACKEND

import zinf_compile
from zinf_compile.checkpoint import saved_pieces
from zinf_compile.checkpoint.manifest import saves_in
from zinf_compile.checkpoint.saved_pieces import SavedPiece
from zinf_compile.optim.record import record_of
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

pytestmark = pytest.mark.keeps_graphs

LAST = 16
"""A chunk of the second optimizer's step, counted over both."""


@contextlib.contextmanager
def placed(place: str) -> Iterator[str]:
    """Context of a place, whose name ends in "apart" beside a device with memory of its own."""
    apart = place.endswith(" apart")
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        yield place.removesuffix(" apart")


@pytest.mark.parametrize("after", [0, 3, LAST])
@pytest.mark.parametrize("place", ["nvme", "in tiles", "nvme and master copies", "nvme apart", "states apart"])
def test_a_checkpoint_has_the_values_after_the_step(place: str, after: int, drive: Path, tmp_path: Path) -> None:
    with placed(place) as name:
        expected, training = expected_in(name, drive), Training(name, drive)
        with held_saves() as saving:
            with saved_during_updates(training, tmp_path, after):
                pass
            step(training, 1)
            step(training, 2)  # before its own thread has written anything
            assert not saves_in(tmp_path)
            saving.set()
            zinf_compile.wait_for_save()
        assert saves_in(tmp_path) == [1]
        assert_equal(loaded(tmp_path, name, drive), expected)


@pytest.mark.parametrize("place", ["nvme", "nvme apart", "states apart", "host apart"])
def test_updates_and_a_save_that_take_turns_as_it_comes(place: str, drive: Path, tmp_path: Path) -> None:
    """Also where states are in host memory, whose update a save waits for."""
    with placed(place) as name:
        expected, training = [expected_in(name, drive, steps) for steps in (1, 2, 3)], Training(name, drive)
        for number in range(3):
            step(training, number)
            folder = tmp_path / str(number)
            zinf_compile.save(folder, training.model, training.optimizers)
        for number in range(3):
            assert_equal(loaded(tmp_path / str(number), name, drive), expected[number])


def test_what_is_updated_is_written_from_its_buffer_and_not_read(drive: Path, tmp_path: Path) -> None:
    training, read = Training("nvme", drive), []
    begin = saved_pieces._begin

    def begun(piece: SavedPiece, buffer: torch.Tensor | None) -> Any:
        read.extend([(piece.owner, piece.start, piece.end)] if piece.read is not None else [])
        return begin(piece, buffer)

    with mock.patch.object(saved_pieces, "_begin", begun):
        with saved_during_updates(training, tmp_path, 3):
            due = [place for each in training.optimizers for place in record_of(each).deferred._places_due()]
        zinf_compile.wait_for_save()
    assert len({owner for owner, _, _ in due}) > LAST, "units and chunks of states"
    assert {type(owner) for owner, _, _ in read} == {type(owner) for owner, _, _ in due}, "what was updated before"
    assert not [(r, d) for r in read for d in due if r[0] == d[0] and r[1] < d[2] and d[1] < r[2]]


def by_synchronizing(training: Training) -> None:
    zinf_compile.synchronize()


def by_reading(training: Training) -> None:
    training.whole()
    training.optimizers[0].state_dict()


def by_hand(training: Training) -> None:
    with torch.no_grad():
        training.model.words.weight.mul_(3.0)
        torch._foreach_add_([training.model.turned, training.model.down.weight], 1.0)


def by_loading(training: Training) -> None:
    zinf_compile.load_full_state_dict(training.model, {k: v + 1 for k, v in zinf_compile.full_state_dict(training.model).items()})
    training.optimizers[0].load_state_dict(training.optimizers[0].state_dict())


def by_resetting(training: Training) -> None:
    for optimizer in training.optimizers:
        optimizer.state.clear()
    training.step()


def by_settings(training: Training) -> None:
    for optimizer in training.optimizers:
        optimizer.param_groups[0].update(lr=3.0, betas=(0.1, 0.2))


def by_leaving(training: Training) -> None:
    del training.compiled, training.model, training.optimizers
    gc.collect()


def by_another_save(training: Training) -> None:
    zinf_compile.save(training.folder, training.model, training.optimizers, keep=2)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "meanwhile",
    [by_synchronizing, by_reading, by_hand, by_loading, by_resetting, by_settings, by_leaving, by_another_save],
    ids=lambda act: act.__name__,
)
def test_whatever_comes_while_it_updates(meanwhile: Callable[[Training], None], drive: Path, tmp_path: Path) -> None:
    expected, training = expected_in("nvme", drive), Training("nvme", drive)
    training.folder = tmp_path  # type: ignore[attr-defined]
    with saved_during_updates(training, tmp_path, 3) as gate:
        threading.Timer(0.2, gate.set).start()
        meanwhile(training)
    zinf_compile.wait_for_save()
    assert_equal(loaded(tmp_path / "save-00000001", "nvme", drive), expected)


def test_the_end_of_a_save_is_waited_for(drive: Path, tmp_path: Path) -> None:
    training = Training("nvme", drive)
    for number, wait in enumerate((zinf_compile.wait_for_save, zinf_compile.reset)):
        with saved_during_updates(training, tmp_path, 3) as gate:
            threading.Timer(0.2, gate.set).start()
            wait()
            assert saves_in(tmp_path) == [number + 1]


def test_the_step_of_one_of_two_optimizers_is_deferred(drive: Path, tmp_path: Path) -> None:
    waiting, training = sides = Training("nvme", drive), Training("nvme", drive)
    for side in sides:
        torch.manual_seed(3)
        side.compiled(torch.randint(23, (4, 6))).backward()
        side.model.down.bias.grad = torch.ones_like(side.model.down.bias, requires_grad=False)
        side.optimizers[1].step()
        assert not is_updating(side.optimizers)
    waiting.optimizers[0].step()
    zinf_compile.synchronize()
    with held_updates(3):
        training.optimizers[0].step()
        zinf_compile.save(tmp_path, training.model, training.optimizers[1])
        assert is_updating(training.optimizers)
    zinf_compile.wait_for_save()
    assert_equal(loaded_model(tmp_path, drive), zinf_compile.full_state_dict(waiting.model))
    with held_updates(3):
        training.optimizers[0].step()
        zinf_compile.save(tmp_path, training.model, training.optimizers)
        assert is_updating(training.optimizers)
    zinf_compile.wait_for_save()
    waiting.optimizers[0].step()
    assert_equal(loaded(tmp_path, "nvme", drive), waiting.whole())


def loaded_model(folder: Path, drive: Path) -> Any:
    other = Training("nvme", drive)
    zinf_compile.load(folder, other.model)
    return zinf_compile.full_state_dict(other.model)


def replaced_states(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def replaced_groups(optimizer: Optimizer) -> None:
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]


def held_state(optimizer: Optimizer) -> Any:
    return next(iter(optimizer.state.values()))["exp_avg"]


@pytest.mark.parametrize("act", [replaced_states, replaced_groups, held_state], ids=lambda act: act.__name__)
def test_it_is_waited_for_where_somebody_has_replaced_or_holds_states(
    act: Callable[[Optimizer], Any], drive: Path, tmp_path: Path
) -> None:
    sides = [Training("nvme", drive) for _ in range(2)]
    for number, training in enumerate(sides):
        zinf_compile.synchronize()
        with held_updates(3) if number else contextlib.nullcontext() as gate:
            step(training)
            if gate is not None:
                threading.Timer(0.2, gate.set).start()
            held = [act(each) for each in training.optimizers]
            if gate is not None:
                zinf_compile.save(tmp_path, training.model, training.optimizers)
                assert not is_updating(training.optimizers)
            del held
    zinf_compile.wait_for_save()
    assert_equal(loaded(tmp_path, "nvme", drive), sides[0].whole())


class Counting(torch.optim.SGD):
    """Has settings that its own step changes, a number for each parameter, and a state that is no tensor."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = group["lr"] * 0.5
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["seen"] = state.get("seen", 0) + 1
        return super().step(closure)


def counting(parameters: Any) -> Optimizer:
    return Counting(parameters, lr=0.5, momentum=0.9)


def nadam(parameters: Any) -> Optimizer:
    return torch.optim.NAdam(parameters, lr=0.01, foreach=False)


def with_tensor_rate(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False, capturable=False)


def settings_of(optimizer: Optimizer) -> Any:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return copy.deepcopy([groups, zinf_compile.full_optimizer_state_dict(optimizer)])


Trained = tuple[nn.Module, Optimizer, Callable[[], None]]


def trained(make: Callable[..., Optimizer], options: dict[str, Any], steps: int) -> Trained:
    """Return a model and its optimizer after some steps, and what takes one more."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
    called = torch.compile(model, backend=BACKEND, options={**options, "compute_shape": {"piece_numel": 128}})
    optimizer = make(model.parameters())

    def once() -> None:
        called(torch.ones(3, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        once()
    return model, optimizer, once


@pytest.mark.parametrize("make", [counting, nadam, with_tensor_rate], ids=lambda make: make.__name__)
def test_settings_and_numbers_are_those_after_the_step(make: Callable[..., Optimizer], drive: Path, tmp_path: Path) -> None:
    """Whatever becomes of them after the save, as by a scheduler."""
    options = {**dict.fromkeys(("params", "grads", "optimizer"), "nvme"), "nvme": str(drive)}
    _, optimizer, _ = trained(make, options, 3)
    expected = settings_of(optimizer)
    model, optimizer, once = trained(make, options, 2)
    zinf_compile.synchronize()
    with held_updates(3):
        once()
        zinf_compile.save(tmp_path, model, optimizer)
        assert is_updating([optimizer])
        group = optimizer.param_groups[0]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(3.0)
        else:
            group["lr"] = 77.0
    once()
    zinf_compile.wait_for_save()
    other, again, _ = trained(make, options, 1)
    zinf_compile.load(tmp_path, other, again)
    assert_equal(settings_of(again), expected)


def test_parameters_in_host_memory_are_those_after_the_step(tmp_path: Path) -> None:
    """Which are updated in place, by an optimizer without states."""

    def plain_sgd(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    options = dict.fromkeys(("params", "grads", "optimizer"), "host")
    with simulating(SimulatedDevice()):
        expected = zinf_compile.full_state_dict(trained(plain_sgd, options, 3)[0])
        model, optimizer, once = trained(plain_sgd, options, 2)
        zinf_compile.synchronize()
        with held_saves():
            with held_updates(3):
                once()
                zinf_compile.save(tmp_path, model, optimizer)
                assert is_updating([optimizer])
            once()
            once()
        zinf_compile.wait_for_save()
        other, again, _ = trained(plain_sgd, options, 1)
        zinf_compile.load(tmp_path, other, again)
        assert_equal(zinf_compile.full_state_dict(other), expected)
