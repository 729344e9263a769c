"""Checkpoints of training on a device: training on is equal to the bit, on the device and from one device to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import late
import pytest
import torch
from late_training import PLACEMENTS, Options, Training, on_drives, same
from marks import more
from rank_late import LONGEST_S, check, on_device
from rank_resume import resumed
from ranks import run_ranks
from safetensors.torch import load_file
from same_leaves import assert_equal

import zinf_compile

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


def going_on(training: Training, steps: range) -> list[torch.Tensor]:
    """Train on; return the losses."""
    found = [loss for step in steps for loss in training.step(training.batches(step, 2))]
    return [loss.cpu() for loss in found]


@pytest.mark.parametrize(
    ("ranks", "place", "done"),
    [
        (1, "host", 2),
        pytest.param(2, "host, updated on the device", 1, marks=pytest.mark.distributed),
        *(more(ranks, place, done) for ranks in (1, 2) for place in ("device", "drive") for done in (0, 2)),
    ],
)
def test_training_on_equals_the_run_that_went_on(ranks: int, place: str, done: int, tmp_path: Path) -> None:
    """With dropout, two optimizers, a scheduler and an averaged model, saved in the background."""
    options = {**on_drives(PLACEMENTS[place], tmp_path), "timeout_s": 60}
    results = run_ranks(on_device, ranks, 1, resumed, str(tmp_path / "saved"), options, done, backend="late")
    for saved, loaded, went_on, again, _, _ in results:
        assert_equal(loaded, saved)
        assert_equal(again, went_on)


def test_a_load_into_host_memory_comes_after_copies_out_of_it(tmp_path: Path) -> None:
    training = Training("late", PLACEMENTS["host"])
    going_on(training, range(2))
    zinf_compile.save(tmp_path / "saved", training.model, training.optimizer, wait=True)
    going_on(training, range(2, 3))
    torch.accelerator.synchronize()
    late.clear()
    with late.delays(0.01, seed=2):
        training.called(training.batches(3, 1)[0])
        zinf_compile.load(tmp_path / "saved", training.model, training.optimizer)
        torch.accelerator.synchronize()
    check()


MOVES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "to the device": (("cpu", "device"), ("late", "host, updated on the device")),
    "from the device": (("late", "states on the drive"), ("cpu", "device")),
    "to another place": (("late", "gradients on the host"), ("late", "drive")),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("way", ["checkpoint", "whole states"])
def test_from_one_device_to_another(move: str, way: str, tmp_path: Path) -> None:
    def training_on(device: str, place: str) -> Training:
        torch.compiler.reset()
        return Training(device, on_drives(PLACEMENTS[place], tmp_path))

    expected = going_on(Training("cpu", None), range(4))
    (source, target) = MOVES[move]
    late.clear()
    with late.delays(LONGEST_S, seed=3):
        one = training_on(*source)
        found = going_on(one, range(2))
        carry = _by_checkpoint if way == "checkpoint" else _by_whole_states
        other = training_on(*target)
        going_on(other, range(1))  # it has other values, and states
        carry(one, other, tmp_path / "saved")
        found += going_on(other, range(2, 4))
        torch.accelerator.synchronize()
    assert same(found, expected)
    check()


def _by_checkpoint(one: Training, other: Training, folder: Path) -> None:
    zinf_compile.save(folder, one.model, one.optimizer)
    one.step(one.batches(2, 2))  # while it is written
    zinf_compile.wait_for_save()
    zinf_compile.load(folder, other.model, other.optimizer)


def _by_whole_states(one: Training, other: Training, folder: Path) -> None:
    zinf_compile.load_full_state_dict(other.model, zinf_compile.full_state_dict(one.model))
    states: dict[str, Any] = zinf_compile.full_optimizer_state_dict(one.optimizer)
    zinf_compile.load_full_optimizer_state_dict(other.optimizer, states)


@pytest.mark.parametrize("place", ["device", "host", more("drive")])
def test_files_of_a_model_on_the_device(place: str, tmp_path: Path) -> None:
    options: Options = on_drives(PLACEMENTS[place], tmp_path)
    with late.delays(LONGEST_S, seed=4):
        training = Training("late", options)
        going_on(training, range(2))
        expected = zinf_compile.full_state_dict(training.model)
        zinf_compile.save_safetensors(training.model, tmp_path / "files")
        torch.save(training.model.state_dict(), tmp_path / "saved.pt")
    for found in (load_file(tmp_path / "files" / "model.safetensors"), torch.load(tmp_path / "saved.pt", map_location="cpu")):
        assert found.keys() == expected.keys()
        assert all(value.equal(expected[name]) for name, value in found.items())
