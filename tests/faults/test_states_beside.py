"""States on drives beside the file of another framework: a save that is killed leaves a file with its own states, or neither."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_saves import Dying, counting
from programs import run_program
from same_leaves import assert_equal
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.errors import CheckpointError
from zinf_compile.hf.files import load_optimizer, save_optimizer

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory


class Training:
    """A small model, its optimizer's states on a drive or in memory, after some steps."""

    def __init__(self, place: str, drive: Path, steps: int) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.model = nn.Linear(24, 20)
        away = {"params": "nvme", "optimizer": "nvme", "nvme": str(drive), "compute_shape": {"piece_numel": 96}}
        self.compiled = torch.compile(self.model, backend=BACKEND, options=away if place == "drive" else {})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, fused=True)
        for step in range(1, steps + 1):
            self.compiled(torch.full((2, 24), float(step))).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        save_optimizer(self.optimizer, folder / "optimizer.pt", [self.model], writes=True)

    def load(self, folder: Path) -> None:
        load_optimizer(self.optimizer, folder / "optimizer.pt", [self.model])

    def states(self) -> Any:
        return zinf_compile.full_optimizer_state_dict(self.optimizer)["state"]


def dies_at(number: int, save: Callable[[], object]) -> bool:
    """Save, dying at a system call; return whether it got so far."""
    dying = Dying(number)
    try:
        with counting(dying):
            save()
    except (OSError, CheckpointError):
        assert dying.dead
    return dying.dead


def names(folder: Path) -> list[str]:
    """Return what is in a folder and in those inside it, but not what is in a save."""
    return sorted(str(path.relative_to(folder)) for path in [*folder.glob("*"), *folder.glob("*/*")])


@pytest.mark.parametrize(("before", "after"), [("drive", "drive"), ("memory", "drive"), ("drive", "memory"), (None, "drive")])
def test_killed_at_each_system_call(before: str | None, after: str, drive: Path, tmp_path: Path) -> None:
    new, other = Training(after, drive, 3), Training("drive", drive, 1)
    kept = tmp_path / "kept"
    kept.mkdir()
    expected = {"new": new.states()}
    if before is not None:
        old = Training(before, drive, 2)
        old.save(kept)
        expected["old"] = old.states()
    seen = []
    for number in itertools.count():
        folder = shutil.copytree(kept, tmp_path / str(number))
        dead = dies_at(number, lambda folder=folder: new.save(folder))  # type: ignore[misc]
        seen.append(found(other, folder, expected))
        if not dead or number % 4 == 0:
            new.save(folder)
            saves = [name for name in names(folder) if name.startswith("optimizer/")]
            assert names(folder) == (["optimizer.pt"] if after == "memory" else ["optimizer", "optimizer.pt", *saves])
            assert len(saves) == (after == "drive")
            other.load(folder)
            assert_equal(other.states(), expected["new"])
        if not dead:
            break
    turn = seen.index("new")
    assert turn > 3
    assert seen == ["none" if before is None else "old"] * turn + ["new"] * (len(seen) - turn)


def found(training: Training, folder: Path, expected: dict[str, Any]) -> str:
    """Load; return the name of the states that are there, or "none" where there is no file, or none that names its states."""
    try:
        training.load(folder)
    except (CheckpointError, FileNotFoundError) as error:
        return "none" if not (folder / "optimizer.pt").exists() else str(error)
    states = training.states()
    steps = {name: {float(state["step"]) for state in each.values()} for name, each in expected.items()}
    (name,) = [name for name in steps if steps[name] == {float(state["step"]) for state in states.values()}]
    assert_equal(states, expected[name])
    return name


def test_states_that_are_not_the_files_own(drive: Path, tmp_path: Path) -> None:
    """Those of another save in the place of the file's, none at all, and a file that is none."""
    one, two = Training("drive", drive, 1), Training("drive", drive, 2)
    one.save(tmp_path / "one")
    two.save(tmp_path / "two")
    before = two.states()
    shutil.rmtree(tmp_path / "two" / "optimizer")
    with pytest.raises(CheckpointError, match=r"No such file or directory: no states are in \S+save-00000001, which \S+ names"):
        two.load(tmp_path / "two")
    shutil.copytree(tmp_path / "one" / "optimizer", tmp_path / "two" / "optimizer")
    with pytest.raises(CheckpointError, match=r"other states than that file was written with are in .*Fetch that folder again"):
        two.load(tmp_path / "two")
    (tmp_path / "two" / "optimizer.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt is no file of torch\.save, or was not written to its end"):
        two.load(tmp_path / "two")
    assert_equal(two.states(), before)
    two.save(tmp_path / "two")
    two.load(tmp_path / "two")
    assert_equal(two.states(), before)


def test_a_file_that_pytorch_alone_reads(drive: Path, tmp_path: Path) -> None:
    """In the format of PyTorch before 1.6, which the reader of names refuses, onto a model that isn't partitioned yet."""
    training, other = Training("memory", drive, 2), Training("drive", drive, 0)
    training.save(tmp_path)
    torch.save(training.optimizer.state_dict(), tmp_path / "optimizer.pt", _use_new_zipfile_serialization=False)
    other.load(tmp_path)
    assert_equal(other.states(), training.states())


KILLED = """
import os, signal, sys, torch, zinf_compile
from pathlib import Path
from zinf_compile.hf.files import save_optimizer
model = torch.nn.Linear(24, 20)
away = {"params": "nvme", "optimizer": "nvme", "nvme": sys.argv[1], "compute_shape": {"piece_numel": 96}}
compiled = torch.compile(model, backend="zero_infinity", options={"compute": "fx", **away})
optimizer = torch.optim.Adam(model.parameters())
file = Path(sys.argv[2], "optimizer.pt")
for step in range(2):
    compiled(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    if step:
        def rename(source, target, really=os.rename):
            if os.path.basename(target) == "optimizer.pt":
                os.kill(os.getpid(), signal.SIGKILL)
            really(source, target)
        os.rename = rename
    save_optimizer(optimizer, file, [model], writes=True)
"""


def test_a_process_killed_between_states_and_file(drive: Path, tmp_path: Path) -> None:
    """The states of its first save are the file's; those of the second one go with the next save."""
    done = run_program(KILLED, str(drive), str(tmp_path))
    assert done.returncode == -9, done.stderr
    states = ["optimizer/save-00000001", "optimizer/save-00000002"]
    assert names(tmp_path) == [".optimizer.pt.partial", "optimizer", "optimizer.pt", *states]
    training = Training("drive", drive, 3)
    training.load(tmp_path)
    assert {float(state["step"]) for state in training.states().values()} == {1.0}
    training.save(tmp_path)
    assert names(tmp_path) == ["optimizer", "optimizer.pt", "optimizer/save-00000002"]
