"""What benchmarks/save.py measures: a save from memory, from a drive to itself, and the training loop beside a save."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _fio
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zinf_compile
from zinf_compile.cli.models import GPT

WIDTH = 1024
MEDIUM = {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 50257, "length": 1024}
"""354M parameters: GPT-2 medium."""

ON_DRIVE = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
"""States that live on a drive."""

Seconds = dict[str, list[float]]
"""Of each round, by what took them."""


class Training:
    """A model that is trained with Adam, on one batch."""

    def __init__(self, model: nn.Module, batch: tuple[torch.Tensor, ...], options: Mapping[str, Any]) -> None:
        zinf_compile.reset()
        self.model, self._batch = model, batch
        self._compiled = torch.compile(model, backend="zero_infinity", options={"compute": "fx", **options})
        self.optimizer = torch.optim.Adam(model.parameters(), fused=True)
        for _ in range(2):
            self.step()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.bytes = 12 * self.parameters
        """Of parameters and Adam's two moments."""

    def step(self) -> float:
        """Take one step; return its seconds."""
        return timed(self._step)

    def save(self, folder: Path, *, wait: bool) -> float:
        """Save; return the seconds until the loop goes on."""
        return timed(lambda: zinf_compile.save(folder, self.model, self.optimizer, wait=wait))

    def _step(self) -> None:
        self._compiled(*self._batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def layers(params: int, options: Mapping[str, Any]) -> Training:
    """Return the training of square layers of about so many parameters, with next to no arithmetic."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, params // WIDTH**2))))
    return Training(model, (torch.ones(8, WIDTH),), options)


def from_memory(folder: Path, params: int, rounds: int) -> dict[str, Any]:
    """Save from memory, in turns with fio, which writes a fresh file, and `dcp.save`."""
    training = layers(params, {})
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process saves
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()["state"]}
    seconds = in_turns(
        folder,
        rounds,
        {
            "save": lambda at: training.save(at, wait=True),
            "dcp": lambda at: timed(lambda: dcp.save(state, storage_writer=_dcp_writer(at), no_dist=True)),
            "fio": lambda at: _fio.seconds(_fio.fresh(at / "fio", training.bytes)),
        },
    )
    return {"bytes": training.bytes, "seconds": seconds}


def from_drive(folder: Path, params: int, rounds: int) -> dict[str, Any]:
    """Save what lives on the drive to the same drive, in turns with fio, which reads a file while it writes a fresh one."""
    training = layers(params, {**ON_DRIVE, "nvme": str(folder)})
    source = folder / "fio-source"
    _fio.seconds(_fio.fresh(source, training.bytes))

    def both(at: Path) -> float:
        return _fio.seconds(_fio.job(source, training.bytes, "read"), _fio.fresh(at / "fio", training.bytes))

    seconds = in_turns(folder, rounds, {"save": lambda at: training.save(at, wait=True), "fio": both})
    source.unlink()
    return {"bytes": training.bytes, "seconds": seconds}


def beside_layers(folder: Path, params: int, rounds: int, *, announce: bool = False) -> dict[str, Any]:
    """Train square layers, whose step is bound by the drive, beside saves; `announce`: with space that is reserved for these."""
    announced = {"checkpoint": str(folder / "saved")} if announce else {}
    return _beside(folder, layers(params, {**ON_DRIVE, "nvme": str(folder), **announced}), rounds)


def beside_gpt(folder: Path, rounds: int) -> dict[str, Any]:
    """Train GPT-2 medium at 1,024 tokens beside saves."""
    tokens, targets = torch.randint(MEDIUM["vocabulary"], (2, 1, MEDIUM["length"]), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = GPT(**MEDIUM)
    return _beside(folder, Training(model, (tokens, targets), {**ON_DRIVE, "nvme": str(folder)}), rounds)


def _beside(folder: Path, training: Training, rounds: int) -> dict[str, Any]:
    """Take a step without a save, save, and take one beside it; then let fio move the bytes of both, into a file with its space.

    A save right after a step, "at once", begins beside the updates that the step has left to the next forward. Bytes are those
    that the process reads and writes, as the kernel counts them.
    """
    seconds: Seconds = {name: [] for name in ("step", "at once", "save", "beside", "rest", "drive")}
    moved: dict[str, list[tuple[int, int]]] = {"step": [], "beside": []}
    source = folder / "fio-source"
    for _ in range(rounds):
        before = storage_bytes()
        seconds["step"].append(training.step() + timed(zinf_compile.synchronize))
        own = storage_bytes()
        training.step()
        seconds["at once"].append(training.save(folder / "saved", wait=False))
        zinf_compile.wait_for_save()
        middle = storage_bytes()
        seconds["save"].append(training.save(folder / "saved", wait=False))
        seconds["beside"].append(training.step())
        seconds["rest"].append(timed(lambda: (zinf_compile.synchronize(), zinf_compile.wait_for_save())))
        after = storage_bytes()
        moved["step"].append((own[0] - before[0], own[1] - before[1]))
        moved["beside"].append((after[0] - middle[0], after[1] - middle[1]))
        read, written = moved["beside"][-1]
        if not source.exists():
            _fio.seconds(_fio.fresh(source, read))
        reads = _fio.job(source, min(read, source.stat().st_size), "read")
        seconds["drive"].append(_fio.seconds(reads, _fio.job(folder / "fio", written, "write")))
        (folder / "fio").unlink()
    source.unlink()
    return {"bytes": training.bytes, "parameters": training.parameters, "seconds": seconds, "moved": moved}


def in_turns(folder: Path, rounds: int, contestants: Mapping[str, Callable[[Path], float]]) -> Seconds:
    """Let each work in a new folder, which then goes; who goes first changes."""
    seconds: Seconds = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            at = folder / "run"
            at.mkdir()
            seconds[name].append(contestants[name](at))
            shutil.rmtree(at)
    return seconds


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def storage_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from drives and written to them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def _dcp_writer(folder: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(folder, thread_count=2, sync_files=True)
