"""What changes while a save is still writing, by steps and by hand: the checkpoint has the values of before."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from held_saves import held_saves
from same_leaves import assert_equal
from small_training import PLACES, Training

import zinf_compile
from zinf_compile.checkpoint import saved_pieces
from zinf_compile.checkpoint.manifest import saves_in
from zinf_compile.checkpoint.parts_writer import PartsWriter
from zinf_compile.checkpoint.saved_pieces import SavedPiece
from zinf_compile.errors import StepFailedError
from zinf_compile.optim.chunk_step import ChunkStep
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

pytestmark = pytest.mark.keeps_graphs


def by_hand(training: Training) -> None:
    with torch.no_grad():
        training.model.frozen.mul_(3.0)
        torch._foreach_add_([training.model.words.weight, training.model.down.weight], 1.0)


def by_data(training: Training) -> None:
    training.model.down.weight.data.copy_(torch.ones(13, 40))
    training.model.frozen.data = torch.zeros_like(training.model.frozen.data)


def by_loading(training: Training) -> None:
    zinf_compile.load_full_state_dict(training.model, {k: v + 1 for k, v in zinf_compile.full_state_dict(training.model).items()})
    for each in training.optimizers:
        state = each.state_dict()
        for values in state["state"].values():
            values.update({k: v * 2 for k, v in values.items() if k in ("exp_avg", "max_exp_avg_sq")})
        each.load_state_dict(state)


def by_resetting(training: Training) -> None:
    for each in training.optimizers:
        each.state.clear()
    training.step()


def by_states(training: Training) -> None:
    for each in training.optimizers:
        for state in each.state.values():
            for name in ("exp_avg", "max_exp_avg_sq"):
                if state.get(name) is not None:
                    state[name].mul_(3.0)


def in_whole(training: Training) -> None:
    with zinf_compile.gathered(training.model, write=True), torch.no_grad():
        training.model.words.weight.fill_(7.0)


CHANGES: dict[str, list[Callable[[Training], None]]] = {
    "steps": [Training.step] * 3,
    "by hand": [by_hand, in_whole, by_data, Training.step],
    "loading": [by_loading, Training.step],
    "states": [by_states, Training.step, by_resetting],
}
CASES = [(place, "steps") for place in PLACES] + [("states", "by hand"), ("in tiles", "loading"), ("states", "states")]


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        pytest.param(place, changes, marks=[] if (place, changes) in CASES else pytest.mark.thorough)
        for place in PLACES
        for changes in CHANGES
    ],
)
def test_a_checkpoint_has_the_values_of_before(place: str, changes: str, drive: Path, tmp_path: Path) -> None:
    with simulating(SimulatedDevice()) if place == "host" else contextlib.nullcontext():
        training = Training(place, drive)
        expected = training.whole()
        with held_saves() as gate:
            zinf_compile.save(tmp_path, training.model, training.optimizers)
            for change in CHANGES[changes]:
                if not (change is by_data and place not in ("device", "states")):
                    change(training)
            assert not saves_in(tmp_path)
            gate.set()
            zinf_compile.wait_for_save()
        assert saves_in(tmp_path) == [1]
        other = Training(place, drive)
        other.step()
        zinf_compile.load(tmp_path, other.model, other.optimizers)
        assert_equal(other.whole(), expected)


def bytes_read(training: Training) -> int:
    zinf_compile.synchronize()
    return int(zinf_compile.stats(training.model)["links"]["nvme to host"]["bytes"])


def test_a_save_beside_a_step_reads_nothing(drive: Path, tmp_path: Path) -> None:
    training = Training("states", drive)
    counted = [bytes_read(training)]
    for saves in (False, True):
        with held_saves() if saves else contextlib.nullcontext() as gate:
            if gate is not None:
                zinf_compile.save(tmp_path, training.model, training.optimizers)
            training.step()
            training.step()  # which chunks are still in memory differs from one to the next
            counted.append(bytes_read(training))
    zinf_compile.wait_for_save()
    assert counted[2] - counted[1] == counted[1] - counted[0] > 0
    assert bytes_read(training) == counted[2]


def test_beside_a_deferred_step_only_what_it_leaves_is_read(drive: Path, tmp_path: Path) -> None:
    training, read = Training("nvme", drive), []
    begin = saved_pieces._begin

    def begun(piece: SavedPiece, buffer: torch.Tensor | None) -> Any:
        read.extend([piece.owner] if piece.read is not None else [])
        return begin(piece, buffer)

    with held_saves() as gate, mock.patch.object(saved_pieces, "_begin", begun):
        zinf_compile.save(tmp_path, training.model, training.optimizers)
        training.step()
        zinf_compile.synchronize()
        gate.set()
        zinf_compile.wait_for_save()
    assert read == [training.model.frozen._zinf_unit]


def in_step(act: Callable[[], None]) -> Any:
    """Return what writes parts, and calls `act` first where a step writes what it is about to change."""
    write = PartsWriter._write

    def written(self: PartsWriter, *args: Any) -> None:
        if threading.current_thread().name != "zinf save":
            act()
        write(self, *args)

    return mock.patch.object(PartsWriter, "_write", written)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the drive")


@pytest.mark.parametrize("place", ["device", "states", "nvme"])
def test_an_error_in_a_step_is_that_of_the_save(place: str, drive: Path, tmp_path: Path) -> None:
    training, twin = Training(place, drive), Training(place, drive)
    torch.manual_seed(1)
    with held_saves() as gate:
        zinf_compile.save(tmp_path, training.model, training.optimizers)
        with in_step(no_space):
            training.step()
        zinf_compile.synchronize()
        gate.set()
        with pytest.raises(OSError, match="No space left on device: 'the drive'"):
            zinf_compile.wait_for_save()
        zinf_compile.wait_for_save()  # it was raised
    training.step()
    torch.manual_seed(1)
    twin.step()
    twin.step()
    assert_equal(training.whole(), twin.whole())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["device", "nvme"])
def test_the_next_save_raises_an_error_once(place: str, drive: Path, tmp_path: Path) -> None:
    training = Training(place, drive)
    expected = training.whole()
    with mock.patch.object(PartsWriter, "finish", side_effect=no_space):
        zinf_compile.save(tmp_path, training.model, training.optimizers)
        with pytest.raises(OSError, match="No space left on device: 'the drive'"):
            zinf_compile.save(tmp_path, training.model, training.optimizers)
    assert list(tmp_path.iterdir()) == []
    zinf_compile.save(tmp_path, training.model, training.optimizers)
    training.step()
    zinf_compile.load(tmp_path, training.model, training.optimizers)
    assert_equal(training.whole(), expected)


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["device", "states"])
def test_an_interrupt_in_a_step_leaves_the_save_whole(place: str, drive: Path, tmp_path: Path) -> None:
    training = Training(place, drive)
    expected = training.whole()
    with held_saves() as gate:
        zinf_compile.save(tmp_path, training.model, training.optimizers)
        with in_step(interrupted), pytest.raises(KeyboardInterrupt):
            training.step()
        gate.set()
        training.step()
        zinf_compile.wait_for_save()
    zinf_compile.load(tmp_path, training.model, training.optimizers)
    assert_equal(training.whole(), expected)


def step_and_synchronize(training: Training) -> None:
    training.step()
    zinf_compile.synchronize()


@pytest.mark.parametrize("place", ["states", "nvme"])
def test_a_step_that_fails_beside_a_save_goes_back_to_it(place: str, drive: Path, tmp_path: Path) -> None:
    training, finish, calls = Training(place, drive), ChunkStep.finish, []
    expected = training.whole()

    def failing(self: ChunkStep, *args: Any) -> None:
        calls.append(self)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        finish(self, *args)

    with held_saves() as gate:
        zinf_compile.save(tmp_path, training.model, training.optimizers)
        with mock.patch.object(ChunkStep, "finish", failing), pytest.raises(StepFailedError, match="out of luck"):
            step_and_synchronize(training)
        gate.set()
        zinf_compile.wait_for_save()
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    zinf_compile.load(tmp_path, training.model, training.optimizers)
    assert_equal(training.whole(), expected)
    training.step()


def writes_of(written: list[str]) -> Any:
    """Return what writes parts, and notes the keys of those that are written on this thread."""
    write, main = PartsWriter._write, threading.get_ident()

    def noted(self: PartsWriter, key: str, *args: Any) -> None:
        written.extend([key] if threading.get_ident() == main else [])
        write(self, key, *args)

    return mock.patch.object(PartsWriter, "_write", noted)


@pytest.mark.parametrize("place", ["device", "states", "nvme"])
def test_save_itself_writes_nothing_that_tells_before_it_changes(place: str, drive: Path, tmp_path: Path) -> None:
    training, written = Training(place, drive), []
    for number in range(2):
        with held_saves(), writes_of(written):
            zinf_compile.save(tmp_path, training.model, training.optimizers)
            assert written == [], number
            training.step()
            zinf_compile.synchronize()
            assert written or place == "nvme", "which the lane of updates has written"
            written.clear()
        zinf_compile.wait_for_save()


def test_save_itself_writes_what_others_may_change(drive: Path, tmp_path: Path) -> None:
    training, written = Training("device", drive), []
    model, adam = training.model, training.optimizers[0]
    expected = training.whole()
    flat, state, states = model.down.weight.detach().view(-1), adam.state[model.turned]["exp_avg"], adam.state[model.words.weight]
    view = adam.state[model.turned]["exp_avg_sq"][3:5]
    given = torch.full_like(model.frozen.data, 3.0)
    model.frozen.data = given
    expected[0]["frozen"] = given.clone()
    with held_saves(), writes_of(written):
        zinf_compile.save(tmp_path, model, training.optimizers)
        assert {key for key in written if key.startswith("model.")} == {"model.down.weight", "model.frozen"}
        names = [f"{name}.{state}" for name in ("turned", "words.weight") for state in ("exp_avg", "exp_avg_sq")]
        assert {key.removeprefix("optimizer.0.state.") for key in written if key.startswith("optimizer")} == set(names)
        flat.zero_()
        given.zero_()
        state.zero_()
        view.zero_()
        states["exp_avg"].fill_(7.0)
    zinf_compile.wait_for_save()
    zinf_compile.load(tmp_path, model, training.optimizers)
    assert_equal(training.whole(), expected)


def test_dicts_of_states_are_those_of_before(drive: Path, tmp_path: Path) -> None:
    """Also after a save, where somebody has a reference to what stood for one of them meanwhile, or has copied it."""
    training = Training("device", drive)
    adam, words = training.optimizers[0], training.model.words.weight
    plain = {p: type(state) for p, state in adam.state.items()}
    with held_saves():
        zinf_compile.save(tmp_path, training.model, training.optimizers)
        watched, copied = adam.state[words], copy.deepcopy(adam.state_dict())
        assert set(watched) == {"step", "exp_avg", "exp_avg_sq", *watched}
        with torch.no_grad():
            watched["exp_avg"].fill_(3.0)
    zinf_compile.wait_for_save()
    assert {p: type(state) for p, state in adam.state.items()} == plain == dict.fromkeys(plain, dict)
    assert watched["exp_avg"] is adam.state[words]["exp_avg"]
    assert not torch.equal(copied["state"][0]["exp_avg"], adam.state[words]["exp_avg"])
    training.step()
