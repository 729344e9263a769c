"""A folder announced for checkpoints, on several ranks, as functions that `test_announced_on_ranks.py` starts."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_resume import Run
from small_drives import fill

import zinf_compile
from zinf_compile.checkpoint import reserved_space
from zinf_compile.checkpoint.reserved_space import reserved_in


def grouped(size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with a process group of all ranks."""
    return {"timeout_s": 60, **options, "process_group": dist.new_group(list(range(size)))}


def outcome(act: Any) -> str:
    """Return class and message of what `act` raises."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sizes(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the sizes of this rank's files as reserved before the first step, and as saved with gradients."""
    run = Run(grouped(size, {**options, "checkpoint": folder}), rank)
    space = reserved_in(Path(folder))
    assert space is not None
    expected = list(space._sizes)
    run.micro_batches(1)
    save = zinf_compile.save(folder, run.model, run.optimizers, wait=True)
    return expected, [path.stat().st_size for path in sorted(save.glob(f"rank-{rank:05}-*.safetensors"))]


def on_a_full_drive(rank: int, size: int, drive: str, options: dict[str, Any]) -> tuple[list[str], list[str], bool]:
    """Find the drive full before the first step; then reserve, let others fill it, and save again and again.

    Returns the errors, the names of the checkpoints, and whether a load gives the last one's values.
    """
    folder, other = f"{drive}/saves", Path(drive) / "other"
    torch.compiler.reset()
    if rank == 0:
        fill(Path(drive), leave=1 << 20)
    dist.barrier()
    errors: list[str] = []

    class Careful(Run):
        def step(self) -> None:
            if not errors:
                before = zinf_compile.full_state_dict(self.model)
                errors.append(outcome(super().step))
                after = zinf_compile.full_state_dict(self.model)
                assert all(torch.equal(value, after[name]) for name, value in before.items())
                dist.barrier()
                if rank == 0:
                    other.unlink()
                dist.barrier()
            super().step()

    run = Careful(grouped(size, {**options, "checkpoint": folder, "checkpoint_keep": 2}), 0)
    dist.barrier()
    if rank == 0:
        fill(Path(drive))
    for _ in range(4):
        run.train(1)
        dist.barrier()
        zinf_compile.save(folder, run.model, run.optimizers)
    zinf_compile.wait_for_save()
    expected = zinf_compile.full_state_dict(run.model)
    run.train(1)
    zinf_compile.load(folder, run.model, run.optimizers)
    found = zinf_compile.full_state_dict(run.model)
    dist.barrier()
    return errors, sorted(os.listdir(folder)), all(torch.equal(value, found[name]) for name, value in expected.items())


def other_folders(rank: int, size: int, folder: str) -> list[str]:
    """Announce folders of different names, then one of which the last rank sees another; return the errors."""
    errors = [outcome(lambda: Run(grouped(size, {"checkpoint": f"{folder}/{rank}"}), 0))]
    dist.barrier()
    zinf_compile.reset()
    really = Path.is_dir

    def elsewhere(path: Path, **more: Any) -> bool:
        return "partial" not in path.name and really(path, **more)

    with mock.patch.object(Path, "is_dir", elsewhere) if rank == size - 1 else contextlib.nullcontext():
        errors.append(outcome(lambda: Run(grouped(size, {"checkpoint": f"{folder}/one"}), 0)))
    dist.barrier()
    assert os.listdir(f"{folder}/one") == []
    return errors


def no_space_on_one(rank: int, size: int, folder: str) -> tuple[str, bool, bool]:
    """Let the last rank's reservation fail by its quota; return the error, and whether space is held then, and after a retry."""
    run: list[Run] = []

    class Late(Run):
        def step(self) -> None:
            run.append(self)

    Late(grouped(size, {"checkpoint": folder}), 0)
    over = mock.patch.object(reserved_space, "fallocate", return_value=errno.EDQUOT)
    with over if rank == size - 1 else contextlib.nullcontext():
        error = outcome(lambda: Run.step(run[0]))
    space = reserved_in(Path(folder))
    held = space is not None and bool(space._slots)
    Run.step(run[0])
    return error, held, bool(reserved_in(Path(folder))._slots)  # type: ignore[union-attr]
