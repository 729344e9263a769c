"""`dcp.save` and `dcp.load` called by the user's own loop, as functions that `test_dcp.py` starts."""

from __future__ import annotations

import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_checkpoint import build, full, train
from rank_load import placed
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from training import BACKEND

import zinf_compile
from zinf_compile.checkpoint import dcp as dcp_module
from zinf_compile.errors import StepFailedError
from zinf_compile.optim.state_ranges import StateRange


def saved(rank: int, size: int, folder: str, options: dict[str, Any]) -> Any:
    """Train and save; return whole states, and the losses of two more steps."""
    torch.compiler.reset()
    compiled, model, optimizer = build(placed(options, size))
    train(compiled, optimizer, range(3))
    dcp.save({**zinf_compile.dcp_state_dict(model, optimizer), "step": 3}, checkpoint_id=folder)
    return full(model, optimizer), train(compiled, optimizer, range(3, 5))


def loaded(rank: int, size: int, folder: str, options: dict[str, Any], fresh: bool) -> Any:
    """Load onto a model that has taken another step, or none; return the same."""
    torch.compiler.reset()
    compiled, model, optimizer = build(placed(options, size))
    optimizer.param_groups[0]["lr"] = 0.5
    if fresh:
        with torch.no_grad():
            compiled(torch.zeros(2, 8, dtype=torch.long))
    else:
        train(compiled, optimizer, range(7, 8))
    state = {**zinf_compile.dcp_state_dict(model, optimizer), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    assert state["step"] == 3
    assert optimizer.param_groups[0]["lr"] == 0.01
    return full(model, optimizer), train(compiled, optimizer, range(3, 5))


def little_in_memory(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[int, int]:
    """Save, load in small parts; return the most bytes of parts that lived at once, and the bytes of all."""
    living, most, total = 0, 0, 0

    def gone(count: int) -> None:
        nonlocal living
        living -= count

    def counted(read: Any) -> Any:
        def call(self: Any, start: int, end: int) -> torch.Tensor:
            nonlocal living, most, total
            found = read(self, start, end)
            weakref.finalize(found.untyped_storage(), gone, found.nbytes)
            living, total = living + found.nbytes, total + found.nbytes
            most = max(most, living)
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_module, "_PART_NUMEL", 64)
        for kind in (StateRange, dcp_module._ParameterRange):
            patch.setattr(kind, "read", counted(kind.read))
        torch.compiler.reset()
        compiled, model, optimizer = build(placed(options, size))
        train(compiled, optimizer, range(2))
        dcp.save(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder)
        saving = most, total
        before = full(model, optimizer)
        train(compiled, optimizer, range(2, 3))
        most = living = 0
        dcp.load(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder)
        torch.testing.assert_close(full(model, optimizer), before, rtol=0, atol=0)
    return max(saving[0], most), saving[1]


def broken(rank: int, size: int, folder: str, options: dict[str, Any]) -> None:
    """A load that fails in its middle leaves what is refused until one succeeds; states of another optimizer are refused."""
    torch.compiler.reset()
    compiled, model, optimizer = build(placed(options, size))
    train(compiled, optimizer, range(2))
    dcp.save(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder)
    after = train(compiled, optimizer, range(2, 4))
    with pytest.MonkeyPatch.context() as patch:
        writes = iter(range(5))
        really = StateRange.write

        def fail(self: Any, start: int, values: torch.Tensor) -> None:
            next(writes)
            really(self, start, values)

        patch.setattr(StateRange, "write", fail)
        with pytest.raises((StopIteration, dcp.api.CheckpointException)):
            dcp.load(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder)
    with pytest.raises(StepFailedError, match=r"dcp\.load ended in its middle.*Load a checkpoint"):
        optimizer.step()
    dcp.load(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder)
    assert train(compiled, optimizer, range(2, 4)) == after
    with pytest.raises(TypeError, match=r"which only dcp\.save and dcp\.load take.* zinf_compile\.save"):
        zinf_compile.dcp_state_dict(model, optimizer)["model"].state_dict()["words.weight"].exp()


class Half(nn.Module):
    """A layer that is used, and one that isn't: the optimizer has no states of it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().sum() + 0 * self.unused.weight.detach().sum() + 0 * self.unused.bias.detach().sum()


def half_used(rank: int, size: int, folder: str, options: dict[str, Any]) -> None:
    """Save before the first step and after it; load onto models that have taken none, the latter onto one that has, too."""

    def made() -> Any:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Half()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        return torch.compile(model, backend=BACKEND, options=placed(options, size)), model, optimizer

    def step(compiled: Any, optimizer: Any) -> float:
        loss = compiled(torch.ones(2, 5))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    compiled, model, optimizer = made()
    with torch.no_grad():
        compiled(torch.ones(2, 5))
    dcp.save(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=f"{folder}/0")
    losses = [step(compiled, optimizer)]
    dcp.save(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=f"{folder}/1")
    losses += [step(compiled, optimizer), step(compiled, optimizer)]
    for number, steps in ((0, 0), (1, 0), (1, 2)):
        compiled, model, optimizer = made()
        with torch.no_grad():
            compiled(torch.ones(2, 5))
        for _ in range(steps):
            step(compiled, optimizer)
        dcp.load(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=f"{folder}/{number}")
        assert [step(compiled, optimizer) for _ in losses[number:]] == losses[number:]
        assert not optimizer.state.get(model.unused.weight)


def own_states(rank: int, size: int, folder: str) -> None:
    """Give an optimizer's own `state_dict()` to `dcp.save`, before and after it went through a file; then through lists."""
    torch.compiler.reset()
    compiled, model, optimizer = build({})
    train(compiled, optimizer, range(2))
    before = full(model, optimizer)
    for name in ("first", "second"):
        with pytest.raises(CheckpointException, match=r"state_dict\(\) has one rank's own shards, which torch\.distributed"):
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/{name}")
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))
        with pytest.raises(CheckpointException):  # of PyTorch's: until the next step the mark is what the file has of it
            dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/{name}")
        train(compiled, optimizer, range(2, 3))
    state = get_optimizer_state_dict(model, optimizer)
    for entry in state["state"].values():  # as it does with full_state_dict
        layout = entry["zinf_layout"]
        entry["zinf_layout"] = {**layout, "order": list(layout["order"]), "elements": list(map(list, layout["elements"]))}
    set_optimizer_state_dict(model, optimizer, state)
    train(compiled, optimizer, range(3, 4))
    assert len(full(model, optimizer)) == len(before)
