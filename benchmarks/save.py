"""Saving a checkpoint from memory, beside fio writing as many bytes and `dcp.save`; and the training loop beside a save.

    python benchmarks/save.py DIR                      # DIR: a folder on the drive; by default the current one
    python benchmarks/save.py DIR --params 100M --rounds 5 --json save.json

The model's parameters and Adam's two moments are saved: 12 bytes per parameter. fio writes fresh files, not preallocated, with
`end_fsync=1`; `torch.distributed.checkpoint` has two threads and `sync_files=True`. They take turns, and who goes first changes;
medians count, and ratios of them. With states on a drive, `wait=False`: how long `save` keeps the loop waiting, beside a step
without a save; how long the step after it takes, during which all is written; and the drive's time for the bytes of both, read
and written at once. Without fio its row is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tabulate import tabulate
from torch import nn

import zinf_compile
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.storage.engine import Engine, File

WIDTH = 1024


class Training:
    """A model of square layers that has taken two steps."""

    def __init__(self, params: int, options: dict[str, Any]) -> None:
        zinf_compile.reset()
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, params // WIDTH**2))))
        self.compiled = torch.compile(self.model, backend="zero_infinity", options={"compute": "fx", **options})
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        for _ in range(2):
            self.step()

    def step(self) -> float:
        """Take one step; return its seconds."""
        start = time.perf_counter()
        self.compiled(torch.ones(8, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_by_fio(folder: Path, size: int) -> None:
    """Write a fresh file, synced at its end."""
    file = ["--name=job", f"--filename={folder / 'fio'}", f"--size={size}", "--rw=write", "--bs=1M"]
    how = ["--ioengine=libaio", "--iodepth=8", "--direct=1", "--end_fsync=1", "--fallocate=none"]
    subprocess.run(["fio", *file, *how], check=True, capture_output=True)


def from_memory(folder: Path, params: int, rounds: int) -> dict[str, float]:
    """Return median seconds by contestant."""
    training = Training(params, {})
    size = 12 * sum(p.numel() for p in training.model.parameters())
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()["state"]}
    contestants: dict[str, Callable[[Path], object]] = {
        "zinf_compile.save": lambda at: zinf_compile.save(at, training.model, training.optimizer, wait=True),
        "dcp.save": lambda at: dcp.save(
            state, storage_writer=dcp.FileSystemWriter(at, thread_count=2, sync_files=True), no_dist=True
        ),
    }
    if shutil.which("fio"):
        contestants["fio"] = lambda at: write_by_fio(at, size)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in sorted(contestants, reverse=bool(number % 2)):
            at = folder / "run"
            at.mkdir()
            seconds[name].append(timed(lambda name=name, at=at: contestants[name](at)))  # type: ignore[misc]
            shutil.rmtree(at)
    return {"bytes": size, **{name: statistics.median(values) for name, values in seconds.items()}}


def read_and_write(folder: Path, read: int, written: int) -> None:
    """Read so many bytes of one file and write as many of another, at once, past the page cache."""
    block, buffers = 4 << 20, [aligned_buffer(4 << 20) for _ in range(8)]
    jobs = [(end / read, "read") for end in range(block, read, block)]
    jobs += [(end / written, "written") for end in range(block, written, block)]
    with Engine() as engine, contextlib.ExitStack() as closing:
        files, places = {}, {"read": 0, "written": 0}
        for name in places:
            (folder / name).touch()
            files[name] = closing.enter_context(File(folder / name, write=name == "written"))
        under_way: list[Any] = []
        for number, (_, name) in enumerate(sorted(jobs)):
            if len(under_way) == len(buffers):
                under_way.pop(0).wait()
            transfer = engine.read if name == "read" else engine.write
            under_way.append(transfer(files[name], places[name], buffers[number % len(buffers)]))
            places[name] += block
        for request in under_way:
            request.wait()


def beside_the_loop(folder: Path, params: int, rounds: int) -> dict[str, float]:
    """Return median seconds of a step, of `save` in the background, of the step that follows it, and of the drive."""
    training = Training(params, {"optimizer": "nvme", "nvme": str(folder)})
    links, saved = zinf_compile.stats(training.model)["links"], 12 * sum(p.numel() for p in training.model.parameters())
    read, written = (links[link]["bytes_last_step"] for link in ("nvme to host", "host to nvme"))
    (folder / "read").write_bytes(bytes(read))
    seconds: dict[str, list[float]] = {name: [] for name in ("step", "save", "next step", "the drive, for both")}
    for _ in range(rounds):
        seconds["step"].append(training.step())
        seconds["save"].append(timed(lambda: zinf_compile.save(folder / "background", training.model, training.optimizer)))
        seconds["next step"].append(training.step() + timed(zinf_compile.wait_for_save))
        seconds["the drive, for both"].append(timed(lambda: read_and_write(folder, read, written + saved)))
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    parser.add_argument("--params", default="8M", help="parameters of the model, in millions with M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    params = round(float(args.params.removesuffix("M")) * (1e6 if args.params.endswith("M") else 1))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        memory = from_memory(Path(folder), params, args.rounds)
        loop = beside_the_loop(Path(folder), params, args.rounds)
        zinf_compile.reset()
    size, ours = memory.pop("bytes"), memory["zinf_compile.save"]
    rows: list[list[Any]] = [[name, value, size / value / 1e9, ours / value] for name, value in memory.items()]
    print(tabulate(rows, headers=[f"{size / 1e6:.0f} MB from memory", "s", "GB/s", "save / it"], floatfmt=".3f"))
    print(
        tabulate(
            [[n, v, v / loop["step"]] for n, v in loop.items()], headers=["states on a drive", "s", "/ step"], floatfmt=".3f"
        )
    )
    if args.json is not None:
        args.json.write_text(json.dumps({"params": params, "bytes": size, "memory_s": memory, "loop_s": loop}, indent=2) + "\n")


if __name__ == "__main__":
    main()
