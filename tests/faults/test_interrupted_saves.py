"""Ctrl-C and forked processes beside a save that goes on in the background: no hang, and each checkpoint is whole or absent."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import interrupted_after
from held_saves import held_saves
from killed_saves import counting
from rank_interrupted import interrupted_on_one_rank
from ranks import run_ranks
from same_leaves import assert_equal
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.checkpoint import background
from zinf_compile.checkpoint.manifest import saves_in
from zinf_compile.checkpoint.reserved_space import reserved_in
from zinf_compile.errors import CheckpointError

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")]


class Training:
    """A model with its optimizer, and gradients that no step has applied."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
        self.compiled = torch.compile(self.model, backend=BACKEND, options={"checkpoint": folder, **options})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.step()
        self.backward()

    def backward(self) -> None:
        self.compiled(torch.randn(3, 40)).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> Any:
        return zinf_compile.full_state_dict(self.model), zinf_compile.full_optimizer_state_dict(self.optimizer)

    def save(self, folder: Path, **options: Any) -> Path:
        return zinf_compile.save(folder, self.model, self.optimizer, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_at_each_system_call_of_a_save(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.save(tmp_path, wait=True)
    expected, last, caught = training.whole(), 1, 0
    for number in itertools.count():
        reached = []

        def interrupt(at: int, name: str, args: Any, number: int = number, reached: list[int] = reached) -> None:
            if threading.current_thread() is threading.main_thread() and name != "close":
                reached.append(at)
                if len(reached) == number + 1:
                    raise KeyboardInterrupt

        with counting(interrupt):
            try:
                training.save(tmp_path, wait=True)
            except KeyboardInterrupt:
                caught += 1
        zinf_compile.wait_for_save()
        assert [n for n in saves_in(tmp_path) if n < last] == []
        last = saves_in(tmp_path)[-1]
        if number % 4 == 0:
            zinf_compile.load(tmp_path, training.model, training.optimizer)
            assert_equal(training.whole(), expected)
        if len(reached) <= number:
            break
    assert caught > 8
    assert names(tmp_path) == [f"save-{last:08}"]
    assert not [thread.name for thread in threading.enumerate() if thread.name == "zinf save"]
    space = reserved_in(tmp_path)
    assert space is not None
    assert len(space._slots) == 1


@pytest.mark.parametrize("where", ["wait_for_save", "save"])
def test_while_a_save_is_waited_for(where: str, tmp_path: Path) -> None:
    training = Training(tmp_path)
    expected = training.whole()
    with held_saves() as gate:
        training.save(tmp_path)
        with interrupted_after(0.3), pytest.raises(KeyboardInterrupt):
            zinf_compile.wait_for_save() if where == "wait_for_save" else training.save(tmp_path)
        assert len(background._current) == 1, "it goes on"
        gate.set()
        training.step()
        zinf_compile.wait_for_save()
    assert names(tmp_path) == ["save-00000001"]
    zinf_compile.load(tmp_path, training.model, training.optimizer)
    assert_equal(training.whole(), expected)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_on_one_of_two_ranks(tmp_path: Path) -> None:
    for rank, (error, left, same) in enumerate(run_ranks(interrupted_on_one_rank, 2, str(tmp_path / "saved"))):
        said = "KeyboardInterrupt: " if rank == 1 else "CheckpointError: no checkpoint is saved in "
        assert error.startswith(said), error
        assert rank == 1 or "named on rank 1: KeyboardInterrupt()" in error
        assert left == ["save-00000002"]
        assert same


def in_child(work: Any) -> int:
    """Call `work` in a forked child, which ends as a program does; return its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # a child that hangs is killed
            work()
            code = 0
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


class Rows(torch.utils.data.Dataset[int]):
    """Numbers; each worker waits for the saves of its process, of which there are none."""

    def __getitem__(self, number: int) -> int:
        zinf_compile.wait_for_save()
        return number

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("place", ["memory", "drive"])
def test_a_child_neither_writes_nor_ends_the_save_of_its_parent(place: str, drive: Path, tmp_path: Path) -> None:
    options = {"optimizer": "nvme", "nvme": str(drive)} if place == "drive" else {}
    training = Training(tmp_path, **options)
    expected = training.whole()

    def child() -> None:
        assert background._current == []
        assert reserved_in(tmp_path) is None
        zinf_compile.wait_for_save()
        with pytest.raises(CheckpointError, match="another process saves its checkpoints in"):
            zinf_compile.save(tmp_path, nn.Linear(3, 3))
        gate.set()  # the child's own
        zinf_compile.save(tmp_path / "own", nn.Linear(3, 3))
        background._end()  # as at the end of a program

    with held_saves() as gate:
        training.save(tmp_path)
        staged = names(tmp_path)
        assert in_child(child) == 0
        loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
        assert torch.cat(list(loader)).tolist() == list(range(8))
        assert [name for name in names(tmp_path) if name != "own"] == staged, "what the parent has staged is there"
        assert not saves_in(tmp_path)
        training.step()
        assert in_child(child) == 0
        gate.set()
        zinf_compile.wait_for_save()
    assert saves_in(tmp_path) == [1]
    zinf_compile.load(tmp_path, training.model, training.optimizer)
    assert_equal(training.whole(), expected)


def held_in(folder: Path) -> list[str]:
    """Return what this process has open there."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [link for link in links if str(folder) in link]


def test_a_child_that_outlives_its_parent_holds_neither_lock_nor_space(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.save(tmp_path, wait=True)
    assert held_in(tmp_path)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, repr(held_in(tmp_path)).encode())
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1000) == b"[]"
    os.close(reader)
    zinf_compile.reset()  # which lets go of the lock, as the end of the process does
    assert held_in(tmp_path) == []
    assert in_child(lambda: zinf_compile.save(tmp_path, nn.Linear(3, 3))) == 0
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert saves_in(tmp_path) == [2]
