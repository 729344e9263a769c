"""Ranks that don't do the same: what each of them does, as functions that `test_rank_failures.py` starts."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from faults import failing
from models import Branches, Mlp, vectors
from torch import nn
from training import BACKEND

import zinf_compile
from zinf_compile.backend.bind import Binder
from zinf_compile.backend.regions import InductorRegions
from zinf_compile.errors import StoreError
from zinf_compile.ir.steps import Gather
from zinf_compile.runtime.executor import PERFORM
from zinf_compile.runtime.storage.scratch_file import ScratchFile
from zinf_compile.runtime.units.pending_updates import Updates
from zinf_compile.sharded.parameter import unit_behind

TIMEOUT_S = 4
"""The option timeout_s of all models here."""

Scenario = Callable[[int, dict[str, Any]], None]


def errors_of(rank: int, size: int, names: list[str]) -> dict[str, str]:
    """Run the scenarios of this module in turn, over a group of its own each; return the error that ended each one."""
    ended: dict[str, str] = {}
    for name in names:
        torch.compiler.reset()
        options = {"process_group": dist.new_group(list(range(size))), "timeout_s": TIMEOUT_S}
        scenario: Scenario = globals()[name]
        try:
            scenario(rank, options)
            ended[name] = "no error"
        except (zinf_compile.ZinfError, KeyError, OSError) as error:
            ended[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return ended


def trained(model: nn.Module, options: dict[str, Any], rank: int, *more: Any) -> Any:
    """Take one step with a model; return its compiled form."""
    compiled = torch.compile(model, backend=BACKEND, options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(*vectors(0, rank), *more).backward()
    optimizer.step()
    optimizer.zero_grad()
    return compiled


def other_options(rank: int, options: dict[str, Any]) -> None:
    trained(Mlp(), {**options, "bucket": ("1MiB", "2MiB")[rank]}, rank)


def other_branch(rank: int, options: dict[str, Any]) -> None:
    model = Branches()
    trained(model, options, rank, True)(*vectors(1, rank), rank == 0)


def other_branch_at_first(rank: int, options: dict[str, Any]) -> None:
    trained(Branches(), options, rank, rank == 0)


def other_model(rank: int, options: dict[str, Any]) -> None:
    trained(Mlp(13 + 2 * rank), options, rank)


def never_calling(rank: int, options: dict[str, Any]) -> None:
    if rank == 0:
        trained(Mlp(), options, rank)


def out_of_batches(rank: int, options: dict[str, Any]) -> None:
    compiled = trained(Mlp(), options, rank)
    if rank == 0:
        compiled(*vectors(1, rank))


def too_late(rank: int, options: dict[str, Any]) -> None:
    """A rank sleeps, and goes on when the other has given up."""
    compiled = trained(Mlp(), options, rank)
    if rank == 1:
        time.sleep(TIMEOUT_S + 3)
    compiled(*vectors(1, rank))


def no_backward(rank: int, options: dict[str, Any]) -> None:
    loss = trained(Mlp(), options, rank)(*vectors(1, rank))
    if rank == 0:
        loss.backward()


def saving_while_training(rank: int, options: dict[str, Any]) -> None:
    model = Mlp()
    compiled = trained(model, options, rank)
    if rank == 0:
        compiled(*vectors(1, rank))
    else:
        zinf_compile.full_state_dict(model)


def evaluating_on_one_rank(rank: int, options: dict[str, Any]) -> None:
    compiled = trained(Mlp(), options, rank)
    if rank == 0:
        with torch.no_grad():
            compiled(*vectors(1, rank))
    compiled(*vectors(1, rank)).backward()


def clipping_on_one_rank(rank: int, options: dict[str, Any]) -> None:
    model = Mlp()
    compiled = trained(model, options, rank)
    compiled(*vectors(1, rank)).backward()
    if rank == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    compiled(*vectors(2, rank))


def raising_in_backward(rank: int, options: dict[str, Any]) -> None:
    """One rank's hook raises, the last of the gradients being on their way; it goes on as if nothing had been."""
    model = Mlp()
    compiled = trained(model, options, rank)
    if rank == 1:
        model.second.weight.register_hook(_raise)
    compiled(*vectors(1, rank)).backward()
    compiled(*vectors(2, rank))


def _raise(*args: Any) -> torch.Tensor:
    raise KeyError("in a hook")


def unscaling_from_a_failing_drive(rank: int, options: dict[str, Any]) -> None:
    """A gradient can't be read on one rank."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", zinf_compile.errors.StoreWarning)  # of a /tmp in memory
        model = Mlp()
        compiled = torch.compile(model, backend=BACKEND, options={**options, "grads": "nvme", "nvme": folder})
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(compiled(*vectors(0, rank))).backward()
        unit = unit_behind(model.first.weight)
        assert unit is not None
        with failing(unit.context.engine, "read", 0) if rank == 1 else contextlib.nullcontext():
            scaler.unscale_(optimizer)


def refused_on_one_rank(rank: int, options: dict[str, Any]) -> None:
    compiled = trained(Mlp(), options, rank)
    error = zinf_compile.PartitionedParameterError("parameter first.weight changed after it was compiled")
    with mock.patch.object(Binder, "_look_up", side_effect=error) if rank == 1 else contextlib.nullcontext():
        compiled(*vectors(1, rank))


def not_compiled_on_one_rank(rank: int, options: dict[str, Any]) -> None:
    error = zinf_compile.errors.CompilationError("Inductor can't compile a region of the model")
    with mock.patch.object(InductorRegions, "compile", side_effect=error) if rank == 1 else contextlib.nullcontext():
        trained(Mlp(), options, rank)


def broken_in_a_graph_of_one_rank(rank: int, options: dict[str, Any]) -> None:
    """The others wait for what it would have sent."""
    compiled = trained(Mlp(), options, rank)
    with mock.patch.dict(PERFORM, {Gather: _raise}) if rank == 1 else contextlib.nullcontext():
        compiled(*vectors(1, rank))


class Lookup(nn.Module):
    """Rows of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.words(indices).square().mean()


def a_lookup_after_a_failed_step(rank: int, options: dict[str, Any]) -> None:
    """A deferred step fails on one rank when the graph that looks rows up has begun."""
    torch.manual_seed(0)
    model = Lookup()
    compiled = torch.compile(model, backend=BACKEND, options={**options, "tile": 4096})
    indices = torch.arange(64).reshape(4, 16)
    compiled(indices).backward()
    unit = unit_behind(model.words.weight)
    assert unit is not None
    if rank == 1:
        unit.updates = Updates({unit: [(0, unit.shard_numel)]})
        unit.updates.fail(lambda: zinf_compile.errors.StepFailedError("a step ended in the middle"))
    compiled(indices)


def a_full_drive(rank: int, size: int, folder: str) -> tuple[str, float]:
    """Let rank 1 have no room for its shards at the first call, and then some; return the error, and the loss afterwards."""
    model = Mlp()
    options = {"timeout_s": TIMEOUT_S, "params": "nvme", "nvme": folder}
    compiled = torch.compile(model, backend=BACKEND, options=options)
    with mock.patch.object(ScratchFile, "reserve", _refuse) if rank == 1 else contextlib.nullcontext():
        try:
            compiled(*vectors(0, rank))
            ended = "no error"
        except (zinf_compile.ZinfError, OSError) as error:
            ended = f"{type(error).__name__}: {error}"
    assert type(model.first.weight) is nn.Parameter
    return ended, compiled(*vectors(0)).item()


def _refuse(file: ScratchFile, size: int) -> None:
    raise StoreError(errno.ENOSPC, "cannot reserve space", file.folder)


class Beside(nn.Module):
    """Layers beside each other, whose backward gathers nothing: all that it sends are gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).square().sum() for layer in self.layers]).sum()


def breaking_in_backward(rank: int, size: int) -> str:
    """Lose the connection at the first gradient of a backward; return its error, or that there was none within a minute."""
    model, x = Beside(), torch.randn(3, 16)
    compiled = torch.compile(model, backend=BACKEND, options={"timeout_s": TIMEOUT_S, "bucket": 1024})
    compiled(x).backward()
    for parameter in model.parameters():
        parameter.grad.local()  # type: ignore[union-attr, operator]  # this backward's reductions have ended
    model.zero_grad()
    context = model.layers[0].weight._zinf_unit.context  # type: ignore[union-attr]
    errors: list[str] = []

    def broken(grads: Any, shards: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    def run() -> None:
        try:
            compiled(x).backward()
            model.layers[0].weight.grad.local()  # type: ignore[union-attr, operator]
        except zinf_compile.ZinfError as error:
            errors.append(f"{type(error).__name__}: {error}")

    context.reductions.reduce_scatter = broken  # type: ignore[union-attr]
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    held = context.memory.inflight_gradients._held  # type: ignore[union-attr]
    return errors[0] if errors and not held else f"stands still: {thread.is_alive()}, {held} bytes on their way"


def lone_ending(rank: int, size: int, how: str) -> None:
    """Train two steps; before the second, rank 1 ends in some way. Runs as the whole of a process."""
    compiled = trained(Mlp(), {"timeout_s": TIMEOUT_S}, rank)
    if rank == 1 and how == "raises":
        raise KeyError("bad batch")
    if rank == 1 and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "has no more batches":
        return
    compiled(*vectors(1, rank)).backward()


def ordinary_ending(rank: int, size: int, destroy: bool) -> None:
    """End right after a backward, its gradients still on their way; leave no thread but daemons."""
    model = Mlp(100_003)
    compiled = trained(model, {}, rank)
    dist.barrier()
    compiled(*vectors(1, rank)).backward()
    if destroy:
        model.second.bias.grad.local()  # type: ignore[attr-defined]  # the last of them arrives
        dist.destroy_process_group()
    assert [t.name for t in threading.enumerate() if not t.daemon] == ["MainThread"]
