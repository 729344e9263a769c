"""Lightning's checkpoints with states on drives beside them: killed anywhere, a file has the states that it was saved with."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_saves import Dying, counting
from lightning_nets import net_type
from same_leaves import assert_equal
from tiers import Sundry, compiled, options_for, words

import zinf_compile
from zinf_compile.errors import CheckpointError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning"),  # of a /tmp in memory
    pytest.mark.filterwarnings("ignore:.*:Warning"),  # Lightning's advice
]


Train = Callable[[str, Path, int], Any]
"""Returns an adopted trainer with a model that has taken some steps, its states on a drive or in memory."""


@pytest.fixture
def trained(lightning: Any) -> Train:
    wrapped = net_type(lightning)

    def train(place: str, folder: Path, steps: int) -> Any:
        torch.compiler.reset()
        net = Sundry()
        compiled(net, options_for(("nvme",) * 3 if place == "drive" else ("device",) * 3, folder, piece=96))
        net(words(0, 0)).backward()  # partitioned before `fit`
        net.zero_grad()
        trainer = zinf_compile.hf.adopt(
            lightning.Trainer(
                max_steps=steps, accelerator="cpu", enable_checkpointing=False, default_root_dir=folder, logger=False,
                enable_progress_bar=False, enable_model_summary=False,
            )
        )  # fmt: skip
        trainer.fit(wrapped(net), torch.utils.data.DataLoader([words(step, 0) for step in range(steps)], batch_size=None))
        return trainer

    return train


def states(trainer: Any) -> Any:
    return zinf_compile.full_optimizer_state_dict(trainer.optimizers[0])["state"]


def load(trainer: Any, path: Path) -> int:
    """Load states as a trainer that resumes does; return the steps that the file says were taken."""
    checkpoint = trainer.strategy.load_checkpoint(path, weights_only=False)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    return int(checkpoint["global_step"])


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in [*folder.glob("*"), *folder.glob("*/*")]}


@pytest.mark.parametrize(("before", "after"), [("drive", "drive"), ("memory", "drive"), ("drive", "memory")])
def test_killed_at_each_system_call(before: str, after: str, trained: Train, drive: Path, tmp_path: Path) -> None:
    old, new, other = trained(before, drive, 1), trained(after, drive, 2), trained("drive", drive, 3)
    expected = {1: states(old), 2: states(new)}
    (tmp_path / "kept").mkdir()
    old.save_checkpoint(tmp_path / "kept" / "last.ckpt")
    seen = []
    for number in itertools.count(0, 2):
        folder = shutil.copytree(tmp_path / "kept", tmp_path / str(number))
        dying = Dying(number)
        try:
            with counting(dying):
                new.save_checkpoint(folder / "last.ckpt")
        except (OSError, CheckpointError):
            assert dying.dead
        steps = load(other, folder / "last.ckpt")
        assert_equal(states(other), expected[steps])
        seen.append(steps)
        if not dying.dead or number % 8 == 0:
            new.save_checkpoint(folder / "last.ckpt")
            left = {name for name in names(folder) if name.startswith("last.ckpt.states/")}
            beside = {"last.ckpt.states", *left} if after == "drive" else set[str]()
            assert {name for name in names(folder) if not name.startswith("tmp")} == {"last.ckpt", *beside}
            assert len(left) == (after == "drive")
        if not dying.dead:
            break
    turn = seen.index(2)
    assert turn > 0
    assert seen == [1] * turn + [2] * (len(seen) - turn)


def test_states_of_an_earlier_run_stay_unread(trained: Train, drive: Path, tmp_path: Path) -> None:
    """They lie beside a file that was saved with states in memory, by a trainer that wasn't adopted."""
    old, new = trained("drive", drive, 1), trained("memory", drive, 2)
    path = tmp_path / "last.ckpt"
    old.save_checkpoint(path)
    kept = shutil.copytree(f"{path}.states", tmp_path / "copy")
    expected = states(new)
    new.save_checkpoint(path)
    assert not Path(f"{path}.states").exists()
    shutil.copytree(kept, f"{path}.states")
    assert load(old, path) == 2
    assert_equal(states(old), expected)


def test_a_link_to_a_file(trained: Train, drive: Path, tmp_path: Path) -> None:
    """As Lightning makes to the last one: its states are those of the file, and stay when the link goes."""
    trainer = trained("drive", drive, 1)
    trainer.save_checkpoint(tmp_path / "step=1.ckpt")
    (tmp_path / "last.ckpt").symlink_to("step=1.ckpt")
    other = trained("drive", drive, 2)
    assert load(other, tmp_path / "last.ckpt") == 1
    assert_equal(states(other), states(trainer))
    other.strategy.remove_checkpoint(tmp_path / "last.ckpt")
    assert load(other, tmp_path / "step=1.ckpt") == 1


def test_a_file_written_in_the_background(trained: Train, drive: Path, tmp_path: Path) -> None:
    """The states that it still names stay until it names others."""
    old, new = trained("drive", drive, 1), trained("drive", drive, 2)
    path = tmp_path / "last.ckpt"
    old.save_checkpoint(path)
    later: list[Any] = []
    io = new.strategy.checkpoint_io
    new.strategy.checkpoint_io = type(
        "Later", (type(io),), {"save_checkpoint": lambda self, *args, **kwargs: later.append((args, kwargs))}
    )()
    for count in (2, 3):
        new.save_checkpoint(path)
        assert len(list(Path(f"{path}.states").iterdir())) == count
        assert load(old, path) == 1
    for args, kwargs in later:
        io.save_checkpoint(*args, **kwargs)
        assert load(old, path) == 2
    new.strategy.checkpoint_io = io
    new.save_checkpoint(path)
    assert [each.name for each in Path(f"{path}.states").iterdir()] == ["save-00000004"]
