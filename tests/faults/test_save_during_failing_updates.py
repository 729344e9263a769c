"""Saves that begin while a step is still updating what it has deferred, where an error or an interrupt ends one of both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from held_updates import held_updates
from same_leaves import assert_equal
from saved_updates import expected_in, loaded, saved_during_updates, step
from small_training import Training

import zinf_compile
from zinf_compile.checkpoint.manifest import saves_in
from zinf_compile.checkpoint.parts_writer import PartsWriter
from zinf_compile.errors import CheckpointError, StepFailedError
from zinf_compile.optim.chunk_step import ChunkStep
from zinf_compile.optim.deferred_step import DeferredStep

pytestmark = pytest.mark.keeps_graphs


def failing(at: int) -> Any:
    """Return what lets the thread that updates fail at a chunk, once the event is set."""
    finish, calls = ChunkStep.finish, []

    def fail(self: ChunkStep, *args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            calls.append(self)
            if len(calls) == at:
                raise RuntimeError("out of luck")
        finish(self, *args)

    return mock.patch.object(ChunkStep, "finish", fail)


def by_another_save(training: Training) -> None:
    zinf_compile.save(training.folder, training.model, training.optimizers, keep=2)  # type: ignore[attr-defined]


TELLING: dict[str, Callable[[Training], object]] = {
    "wait_for_save": lambda training: zinf_compile.wait_for_save(),
    "another save": by_another_save,
    "a step": Training.step,
    "a read": lambda training: zinf_compile.full_state_dict(training.model),
    "synchronize": lambda training: zinf_compile.synchronize(),
}


@pytest.mark.parametrize("told", TELLING)
def test_a_save_fails_with_the_step_and_the_last_one_stands(told: str, drive: Path, tmp_path: Path) -> None:
    training = Training("nvme", drive)
    training.folder = tmp_path  # type: ignore[attr-defined]
    expected = training.whole()
    path = zinf_compile.save(tmp_path, training.model, training.optimizers, wait=True)
    with failing(at=6), saved_during_updates(training, tmp_path, 4) as gate:
        gate.set()
        with pytest.raises(StepFailedError, match=f"out of luck|ended in the middle.*zinf_compile.load.*{path.name}"):
            TELLING[told](training)
    assert saves_in(tmp_path) == [1]
    zinf_compile.load(tmp_path, training.model, training.optimizers)  # raises nothing more
    assert_equal(training.whole(), expected)
    step(training)
    zinf_compile.save(tmp_path, training.model, training.optimizers, wait=True)
    assert saves_in(tmp_path) == [2]
    assert [each.name for each in tmp_path.iterdir()] == ["save-00000002"], "what the failed one left is gone"


def test_an_error_of_the_drive_is_that_of_the_save_alone(drive: Path, tmp_path: Path) -> None:
    expected, training = expected_in("nvme", drive, 2), Training("nvme", drive)
    write = PartsWriter._write

    def no_space(self: PartsWriter, *args: Any) -> None:
        if threading.current_thread().name != "zinf save":
            raise OSError(28, "No space left on device", "the drive")
        write(self, *args)

    with mock.patch.object(PartsWriter, "_write", no_space):
        with saved_during_updates(training, tmp_path, 3):
            pass
        with pytest.raises(OSError, match="No space left on device: 'the drive'"):
            zinf_compile.wait_for_save()
    step(training, 1)
    assert_equal(training.whole(), expected)
    assert not saves_in(tmp_path)


def test_an_interrupt_as_it_begins_costs_the_save_alone(drive: Path, tmp_path: Path) -> None:
    training = Training("nvme", drive)
    step(training)
    zinf_compile.synchronize()
    with held_updates(3), mock.patch.object(DeferredStep, "let_save", side_effect=KeyboardInterrupt):
        step(training, 1)
        with pytest.raises(KeyboardInterrupt):
            zinf_compile.save(tmp_path, training.model, training.optimizers)
    with pytest.raises(CheckpointError, match="interrupted"):
        zinf_compile.wait_for_save()
    expected = training.whole()
    zinf_compile.save(tmp_path, training.model, training.optimizers, wait=True)
    assert_equal(loaded(tmp_path, "nvme", drive), expected)
