"""Creating a model on a drive: from a seed and from safetensors, compared with writing as many bytes.

    python benchmarks/birth.py DIR                          # DIR: a folder on the drive; by default the current one
    python benchmarks/birth.py DIR --width 1024             # a smaller one than 3.1B
    python benchmarks/birth.py DIR --json birth.json        # keep the numbers
    python benchmarks/birth.py --docs birth.json            # measure nothing: write its table in docs/ from kept numbers

A GPT in bf16 made on meta is partitioned with all its parameters on the drive, from a seed and from files that were saved before;
in turns with a store that writes the same shards from memory, which is the limit of all. Files are in the page cache, as after a
download, or out of it: then they come from the same drive, and what that takes to read as many bytes while it writes as many,
neither waiting for the other, is the limit. The random numbers alone are drawn as PyTorch does, one by one on one core. Time ends
when the last byte is written; what it takes to give the space back doesn't count.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import _docs
import torch
from capacity import model_of, parameters_of
from tabulate import tabulate

import zinf_compile
from zinf_compile.cli.models import GPT
from zinf_compile.ir.compute_shape import PIECE_NUMEL
from zinf_compile.ir.pieces import cut_pieces
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.storage.engine import Engine, File
from zinf_compile.runtime.storage.extent_store import Store

TARGETS = {"seed": 6, "cached": 1.5, "files": 1.5}
"""The largest ratios to writing that are good enough; PyTorch's own kernels draw a seed's numbers, on two cores."""
_READ_BYTES = 8 << 20


def make(width: int) -> torch.nn.Module:
    """Return a model on meta."""
    with torch.device("meta"):
        return GPT(**model_of(width)).to(torch.bfloat16)


def write_shards(width: int, folder: str) -> Store:
    """Write as many bytes as the parameters have, in the same pieces."""
    model = make(width)
    sizes = [p.numel() for p in model.parameters()]
    pieces = [(start, end) for size in sizes for start, end in cut_pieces(size, piece_numel=PIECE_NUMEL)]
    source = aligned_buffer(2 * PIECE_NUMEL, pinned=False)
    store = Store(folder, [(str(number), 2 * (end - start)) for number, (start, end) in enumerate(pieces)])
    under_way: list[Any] = []
    for number, (start, end) in enumerate(pieces):
        under_way.append(store.write(str(number), source[: 2 * (end - start)]))
        if len(under_way) > 4:
            under_way.pop(0).wait()
    for transfer in under_way:
        transfer.wait()
    return store


def draw(width: int) -> None:
    """Draw the model's random numbers and drop them."""
    room = torch.empty(max(p.numel() for p in make(width).parameters()), dtype=torch.bfloat16)
    for module in make(width).modules():
        if isinstance(module, torch.nn.Linear):
            room[: module.weight.numel()].uniform_()
        elif isinstance(module, torch.nn.Embedding):
            room[: module.weight.numel()].normal_()


def from_seed(width: int, folder: str) -> torch.nn.Module:
    """Make the model."""
    return zinf_compile.partition(make(width), params="nvme", nvme=folder)


def from_files(width: int, folder: str, files: str) -> torch.nn.Module:
    """Load it."""
    return zinf_compile.partition(make(width), params="nvme", nvme=folder, checkpoint=files)


def read_files(folder: str) -> None:
    """Read a folder's files with direct I/O, several ranges in flight, and drop the data."""
    rooms = [aligned_buffer(_READ_BYTES, pinned=False) for _ in range(4)]
    under_way: list[Any] = []
    with Engine() as engine:
        for path in Path(folder).iterdir():
            file, size = File(path), path.stat().st_size // 4096 * 4096
            for number, offset in enumerate(range(0, size, _READ_BYTES)):
                if len(under_way) == len(rooms):
                    under_way.pop(0).wait()
                under_way.append(engine.read(file, offset, rooms[number % len(rooms)][: min(_READ_BYTES, size - offset)]))
            while under_way:
                under_way.pop(0).wait()


def write_and_read(width: int, folder: str, files: str) -> Store:
    """Write and read concurrently, neither waiting for the other."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_files, files)
        store = write_shards(width, folder)
        reading.result()
    return store


def drop_cache(folder: str) -> None:
    """Evict a folder's files from the page cache."""
    for path in Path(folder).iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def fill_cache(folder: str) -> None:
    """Read a folder's files into the page cache."""
    for path in Path(folder).iterdir():
        with path.open("rb") as file:
            while file.read(_READ_BYTES):
                pass


def timed(act: Callable[[], object]) -> float:
    """Return the seconds that a call takes; its result is dropped afterwards."""
    gc.collect()
    began = time.perf_counter()
    made = act()
    seconds = time.perf_counter() - began
    del made
    return seconds


def measure(width: int, drive: str, rounds: int) -> dict[str, Any]:
    """Take turns; return the seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in _NAMES}
    with tempfile.TemporaryDirectory(dir=drive) as folder, tempfile.TemporaryDirectory(dir=drive) as files:
        zinf_compile.save_safetensors(from_seed(width, folder), files)
        for _ in range(rounds):
            seconds["write"].append(timed(lambda: write_shards(width, folder)))
            seconds["seed"].append(timed(lambda: from_seed(width, folder)))
            seconds["draw"].append(timed(lambda: draw(width)))
            fill_cache(files)
            seconds["cached"].append(timed(lambda: from_files(width, folder, files)))
            drop_cache(files)
            seconds["both"].append(timed(lambda: write_and_read(width, folder, files)))
            drop_cache(files)
            seconds["files"].append(timed(lambda: from_files(width, folder, files)))
    return {"width": width, "parameters": parameters_of(width), "rounds": rounds, "seconds": seconds}


_NAMES = {
    "write": "the shards written from memory",
    "seed": "made from a seed",
    "draw": "its random numbers alone, by PyTorch",
    "cached": "loaded from safetensors in the page cache",
    "files": "loaded from safetensors on the same drive",
    "both": "the shards written and as many bytes read at once",
}


def report(result: dict[str, Any]) -> str:
    """Return a table and what became of the targets."""
    medians = {name: statistics.median(values) for name, values in result["seconds"].items()}
    size = 2 * result["parameters"] / 1e9
    cells = [
        [text, f"{medians[name]:.2f}", f"{size / medians[name]:.2f}", f"{medians[name] / medians['write']:.2f}"]
        for name, text in _NAMES.items()
    ]
    lines = [
        f"- {_NAMES[name]} / written: {(found := medians[name] / medians['write']):.2f}, target at most {target}: "
        f"{'met' if found <= target else 'missed'}"
        for name, target in TARGETS.items()
    ]
    lines.append(
        f"- {_NAMES['files']} / what the drive takes to write and read as much: {medians['files'] / medians['both']:.2f}"
    )
    title = f"{result['parameters'] / 1e6:,.0f}M parameters in bf16, medians of {result['rounds']}:"
    table = tabulate(cells, ["what", "s", "GB/s", "/ written"], tablefmt="github", disable_numparse=True)
    return "\n\n".join([title, table, "\n".join(lines)])


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".", help="a folder on the drive")
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.docs:
        _docs.write("benchmarks/birth.py", report, options.docs)
        return
    result = measure(options.width, options.folder, options.rounds)
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
