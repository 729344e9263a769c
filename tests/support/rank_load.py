"""Loads that fail on one rank or on all, on several ranks, as functions that `test_load.py` starts."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from damaged_saves import damage_a_state
from faults import failing, offloaded_of
from rank_checkpoint import Uneven, build, full, optimizer_of, train
from tiers import context_of
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.checkpoint import open_files, parts_writer, saved_files, saved_tensors, stretches
from zinf_compile.checkpoint.saved_files import SavedFiles
from zinf_compile.errors import BudgetError, CheckpointError, RankMismatchError, StepFailedError, StoreError


def placed(options: dict[str, Any], size: int) -> dict[str, Any]:
    """Return options with a process group of all ranks."""
    return {"compute": "fx", **options, **({"process_group": dist.new_group(list(range(size)))} if size > 1 else {})}


def refused(compiled: Any, optimizer: Any) -> None:
    """Nobody computes with what is there."""
    for _ in range(2):
        with pytest.raises(StepFailedError, match=r"ended in its middle|ended in the middle|are incomplete"):
            compiled(torch.zeros(2, 8, dtype=torch.long))


def failed(rank: int, size: int, folder: str, options: dict[str, Any]) -> Any:
    """Refuse a file damaged for one rank, another model on one, other saves; after each failure `load` is the way out."""
    torch.compiler.reset()
    compiled, model, optimizer = build(placed(options, size))
    train(compiled, optimizer, range(2))
    saved = zinf_compile.save(f"{folder}/saved", model, optimizer, wait=True)
    before = full(model, optimizer)
    after = train(compiled, optimizer, range(2, 4))

    own = Path(folder) / f"own-{rank}" / saved.name  # as on nodes that fetched it each
    shutil.copytree(saved, own)
    largest = max(own.glob("rank-*.safetensors"), key=lambda path: path.stat().st_size)
    if rank == size - 1:
        damage_a_state(own)
    with pytest.raises(CheckpointError, match=rf"(named on rank {size - 1}: )?.*is damaged: the checksum of"):
        zinf_compile.load(own.parent, model, optimizer)
    if "params" in options:  # what is whole on each rank was not touched; shards may be
        refused(compiled, optimizer)
        with pytest.raises(StepFailedError, match="ended in its middle"):
            optimizer.step()

    if rank == size - 1:
        largest.unlink()
    with pytest.raises(CheckpointError, match=rf"{largest.name} of the checkpoint cannot be read"):
        zinf_compile.load(own, model, optimizer)
    others = build(placed(options, size))
    with pytest.raises(CheckpointError, match=r"doesn't fit; nothing was changed.*unexpected: words\.weight"):
        zinf_compile.load(saved, nn.Linear(3, 3), torch.optim.AdamW(nn.Linear(3, 3).parameters()))
    lacking = others[2] if rank else torch.optim.AdamW(list(model.parameters())[:2])
    with pytest.raises(CheckpointError, match=r"group 0 of optimizer|groups of parameters|one that the model has not"):
        zinf_compile.load(saved, model, lacking)
    elsewhere = saved
    if rank:
        elsewhere = Path(shutil.copytree(saved, f"{folder}/edited-{rank}/{saved.name}"))
        (elsewhere / "manifest.json").write_text((elsewhere / "manifest.json").read_text() + " ")
    with pytest.raises(CheckpointError, match=r"the ranks are not doing the same thing.*checksum"):
        zinf_compile.load(elsewhere, model, optimizer)

    zinf_compile.load(saved, model, optimizer)
    optimizer.zero_grad()
    torch.testing.assert_close(full(model, optimizer), before, rtol=0, atol=0)
    assert train(compiled, optimizer, range(2, 4)) == after
    return None


def stepped(rank: int, size: int, folder: str, options: dict[str, Any]) -> Any:
    """Let a step fail on the last rank alone; load on all, and go on as if nothing had been."""
    torch.compiler.reset()
    compiled, model, optimizer = build(placed(options, size))
    train(compiled, optimizer, range(2))
    saved = zinf_compile.save(f"{folder}/saved", model, optimizer, wait=True)
    after = train(compiled, optimizer, range(2, 4))
    for late in (False, True):
        zinf_compile.load(saved, model, optimizer)
        zinf_compile.synchronize()
        for states in offloaded_of(optimizer):
            states._defers = late
        compiled(torch.ones(2, 8, dtype=torch.long)).backward()
        last = rank == size - 1
        with contextlib.ExitStack() as faults:
            if last:
                faults.enter_context(failing(context_of(model).engine, "read", 9))
                faults.enter_context(pytest.raises((StepFailedError, StoreError), match=rf"zinf_compile\.load\('{saved}', model"))
            else:
                faults.enter_context(contextlib.suppress(RankMismatchError))
            optimizer.step()
            zinf_compile.synchronize()
        optimizer.zero_grad()
        zinf_compile.load(saved, model, optimizer)
        assert train(compiled, optimizer, range(2, 4)) == after, late
    return None


def read_bytes(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[int, int]:
    """Load with short stretches of checksums; return the bytes read of tensors' files, and those of this rank's elements."""
    opened: list[SavedFiles] = []

    class Noted(SavedFiles):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        for module in (parts_writer, saved_files, saved_tensors, stretches):
            patch.setattr(module, "CHECKED_BYTES", 64)
        patch.setattr(open_files, "SavedFiles", Noted)
        torch.compiler.reset()
        compiled, model, optimizer = build(placed(options, size))
        train(compiled, optimizer, range(1))
        saved = zinf_compile.save(f"{folder}/saved-by-{size}", model, optimizer, wait=True)
        dist.barrier()
        torch.compiler.reset()
        found = sorted(Path(folder).glob("saved-by-*"))[0]
        zinf_compile.load(found, model, optimizer)
        assert saved.exists()
    (files,) = opened
    shards = sum(p._zinf_unit.valid * (3 if p.requires_grad else 1) for p in model.parameters())
    return files.read_bytes, 4 * shards


class Kinds(Uneven):
    """Empty and 16-bit tensors besides."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.randn(7, 3).bfloat16())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("shorter", torch.arange(5).half())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.short.float().square().mean() + self.nothing.sum()


def saved_kinds(rank: int, size: int, folder: str, options: dict[str, Any]) -> None:
    """Train and save; rank 0 saves by PyTorch what is to be found in it."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Kinds()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    compiled = torch.compile(model, backend=BACKEND, options=placed(options, size))
    train(compiled, optimizer, range(2))
    zinf_compile.save(f"{folder}/saved", model, optimizer, wait=True)
    values, states = full(model, optimizer)
    if rank == 0:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        expected = {f"model.{name}": value for name, value in values.items()}
        for number, found in states["state"].items():
            expected |= {f"optimizer.state.{names[number]}.{name}": value for name, value in found.items()}
        torch.save(expected, f"{folder}/expected.pt")


def onto_meta(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[Any, list[float], list[int]]:
    """Load onto a model on meta; return its whole states, losses afterwards, and the bytes read by this and by another load.

    The last rank alone gets a damaged file first: an error on all, and the model is on meta again.
    """
    opened: list[SavedFiles] = []

    class Noted(SavedFiles):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

    torch.compiler.reset()
    with torch.device("meta"):
        model = Uneven()
    optimizer = optimizer_of(model)
    group = placed(options, size)
    compiled = torch.compile(model, backend="zero_infinity", options=group)
    (saved,) = Path(folder).glob("save-*")
    own = Path(folder) / f"own-{rank}" / saved.name
    shutil.copytree(saved, own)
    if rank == size - 1:
        damage_a_state(own)
    with pytest.raises(CheckpointError, match=rf"(named on rank {size - 1}: )?.*is damaged: the checksum of"):
        zinf_compile.load(own.parent, compiled, optimizer)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    with pytest.raises(BudgetError, match=r"the smallest that works is [\d,]+"):
        zinf_compile.load(
            saved, torch.compile(model, backend="zero_infinity", options={**group, "device_memory": 2000}), optimizer
        )
    assert {p.device.type for p in model.parameters()} == {"meta"}
    read = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_files, "SavedFiles", Noted)
        for _ in range(2):
            assert zinf_compile.load(saved, compiled, optimizer)["step"] == 3
            read.append(sum(files.read_bytes for files in opened))
            opened.clear()
    return full(model, optimizer), train(compiled, optimizer, range(3, 5)), read
