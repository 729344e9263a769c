"""The store beside fio, on the same file: bytes per second and CPU seconds per GB of writes, reads, and half of each.

    python benchmarks/io.py DIR                    # DIR: a folder on the drive; by default the current one
    python benchmarks/io.py DIR --json io.json     # keep the numbers
    python benchmarks/io.py --docs io.json         # measure nothing: write its table in docs/ from kept numbers

Both move the file from its start to its end with direct I/O, the same block size and as many blocks at a time; they take turns,
and who goes first changes, so that a busy machine is busy for both. fio uses the engine that was the faster one here, the store
computes and verifies checksums. What counts are the ratios of medians. fio never looks at what it moves, so two more take turns:
fio with a CRC32C in each block, computed and verified by itself (on a file of its own, which it wrote so), and the store without
checksums. What any check of what was read costs at least is one pass over what has just arrived (`torch.amax`, timed in the same
run).
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _docs
import _fio
import torch
from _fio import Sample
from tabulate import tabulate

from zinf_compile.ir.sizes import parse_bytes
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.extent_store import Store, Transfer
from zinf_compile.runtime.system.filesystem import look_up

NAMES = {"write": "writes", "read": "reads", "both": "half reads, half writes"}
CONTESTANTS = {
    "fio": "fio",
    "zinf_without_checksums": "store, no checksums",
    "fio_with_checksums": "fio, verifying",
    "zinf": "store",
}
LEAST_RATE, MOST_CPU = 0.95, 1.3
PASS_BYTES = 64 << 20
EXTENT_BYTES = 4 << 20
"""What one call of the store transfers."""


class Shards:
    """A store of equal extents, read and written from a few buffers that are used in turn."""

    def __init__(self, folder: str, size: int, *, engine: str, block: int, depth: int, verify: bool) -> None:
        self.engine = Engine(engine, depth=depth, chunk_bytes=block)
        self._count = size // EXTENT_BYTES
        self._store = Store(folder, [(n, EXTENT_BYTES) for n in range(self._count)], engine=self.engine, verify=verify)
        self.file = self._store.files[0]
        places = depth * block // EXTENT_BYTES + 2  # the drive never waits for the next
        self._buffers = aligned_buffer(places * EXTENT_BYTES).fill_(7).split(EXTENT_BYTES)

    def run(self, mode: str) -> Sample:
        """Move every extent once; "both": read the first half of them and write the second, in turn."""
        wall, cpu = time.perf_counter(), time.process_time()
        under_way: collections.deque[Transfer] = collections.deque()
        half = self._count // 2
        for number in range(self._count):
            if len(under_way) == len(self._buffers):
                under_way.popleft().wait()
            key = number if mode != "both" else number // 2 + number % 2 * half
            write = mode == "write" or (mode == "both" and number % 2 == 1)
            transfer = self._store.write if write else self._store.read
            under_way.append(transfer(key, self._buffers[number % len(self._buffers)]))
        for transfer in under_way:
            transfer.wait()
        moved = self._count * EXTENT_BYTES
        return Sample(moved / (time.perf_counter() - wall), (time.process_time() - cpu) / (moved / 1e9))


def pass_s_per_gb(shards: Shards) -> float:
    """Return the CPU seconds that one pass over a GB takes which has just come from the drive; the median of some."""
    torch.set_num_threads(1)
    buffer = aligned_buffer(PASS_BYTES)
    seconds = []
    for _ in range(15):
        shards.engine.read(shards.file, 0, buffer).wait()
        start = time.thread_time()
        buffer.view(torch.int32).amax()
        seconds.append(time.thread_time() - start)
    return statistics.median(seconds) / (PASS_BYTES / 1e9)


def take_turns(mode: str, shards: Shards, bare: Shards, run_fio: Callable[..., Sample], pairs: int) -> dict[str, Any]:
    """Measure one mode; return its numbers."""
    shards.run("write")  # what fio wrote is not what the store's checksums expect
    best = max(_fio.ENGINES, key=lambda engine: run_fio(engine, mode).bytes_per_s)
    run_fio(best, "write", verify=True)
    turns = {
        "fio": lambda: run_fio(best, mode),
        "zinf": lambda: shards.run(mode),
        "zinf_without_checksums": lambda: bare.run(mode),
        "fio_with_checksums": lambda: run_fio(best, mode, verify=True),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in CONTESTANTS}
    for pair in range(pairs):
        for name in turns if pair % 2 == 0 else reversed(turns):
            samples[name].append(turns[name]())
            print(f"\r{mode}: pair {pair + 1} of {pairs} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {"mode": mode, "fio_engine": best, "samples": samples}


def measure(folder: str, *, engine: str, size: int, block: int, depth: int, pairs: int, verify: bool) -> dict[str, Any]:
    """Alternate fio and the store; return the numbers."""
    size -= size % (2 * EXTENT_BYTES)
    version, place = _fio.version(), look_up(folder)
    shards = Shards(folder, size, engine=engine, block=block, depth=depth, verify=verify)
    bare = Shards(folder, size, engine=engine, block=block, depth=depth, verify=False)
    bare.run("write")
    with tempfile.TemporaryFile(dir=folder) as checked:
        os.posix_fallocate(checked.fileno(), 0, size)

        def run_fio(engine: str, mode: str, *, verify: bool = False) -> Sample:
            fd = checked.fileno() if verify else shards.file.fd
            return _fio.run(engine, mode, fd=fd, size=size, block=block, depth=depth, verify=verify)

        rows = [take_turns(mode, shards, bare, run_fio, pairs) for mode in NAMES]
    return {
        "fio": version,
        "engine": shards.engine.name,
        "filesystem": place.kind,
        "size_bytes": size,
        "block_bytes": block,
        "depth": depth,
        "pairs": pairs,
        "checksums": verify,
        "cpus": os.cpu_count(),
        "pass_s_per_gb": pass_s_per_gb(shards),
        "rows": rows,
    }


def summarise(row: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the medians of a mode by contestant: GB/s, and CPU seconds per GB."""
    rates, cpus = (
        {name: statistics.median(sample[part] for sample in samples) for name, samples in row["samples"].items()}
        for part in (0, 1)
    )
    return {name: rate / 1e9 for name, rate in rates.items()}, cpus


def report(result: dict[str, Any]) -> str:
    """Return a title, the tables, and what became of the targets."""
    checks = "checksums on" if result["checksums"] else "checksums off"
    title = (
        f"{result['size_bytes'] / 2**30:.1f} GiB on {result['filesystem']}, blocks of {result['block_bytes'] >> 10:,} KiB, "
        f"{result['depth']} at a time, engine {result['engine']}, {checks}, {result['fio']}, medians of {result['pairs']} pairs:"
    )
    rates, cpus, lines = [], [], []
    for row in result["rows"]:
        rate, cpu = summarise(row)
        rate_ratio, cpu_ratio, fair_ratio = (
            rate["zinf"] / rate["fio"],
            cpu["zinf"] / cpu["fio"],
            cpu["zinf"] / cpu["fio_with_checksums"],
        )
        name = NAMES[row["mode"]]
        shown = [rate[who] for who in CONTESTANTS]
        rates.append([name, row["fio_engine"], *(f"{value:.2f}" for value in [*shown, rate_ratio])])
        shown = [cpu[who] for who in CONTESTANTS]
        cpus.append([name, *(f"{value:.3f}" for value in shown), f"{cpu_ratio:.2f}", f"{fair_ratio:.2f}"])
        lines.append(
            f"- {name}: store / fio {rate_ratio:.2f}, target at least {LEAST_RATE}: {_met(rate_ratio >= LEAST_RATE)}; "
            f"CPU, store / fio {cpu_ratio:.2f}, target at most {MOST_CPU}: {_met(cpu_ratio <= MOST_CPU)}; "
            f"store / fio that verifies too {fair_ratio:.2f}: {_met(fair_ratio <= MOST_CPU)}"
        )
    tables = [
        tabulate(rows, headers, tablefmt="github", disable_numparse=True)
        for headers, rows in (
            (["GB/s", "fio engine", *CONTESTANTS.values(), "store / fio"], rates),
            (["CPU s/GB", *CONTESTANTS.values(), "store / fio", "store / fio, verifying"], cpus),
        )
    ]
    limit = (
        f"Limit of the CPU time of checked reads: what they take without checksums, and {result['pass_s_per_gb']:.3f} s/GB "
        "for one pass over what has arrived (torch.amax)."
    )
    return "\n\n".join([title, *tables, "\n".join(lines), limit])


def _met(met: bool) -> str:
    return "met" if met else "missed"


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".")
    parser.add_argument("--size", default="8GiB", help="of the file: larger than any cache below it (default 8GiB)")
    parser.add_argument("--block", default="1MiB")
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--engine", choices=["auto", "io_uring", "threads"], default="auto", help="the store's")
    parser.add_argument("--no-verify", action="store_true", help="without checksums, to see what they cost")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.docs:
        _docs.write("benchmarks/io.py", report, options.docs)
        return
    size, block = parse_bytes(options.size, option="size"), parse_bytes(options.block, option="block")
    result = measure(
        options.folder,
        engine=options.engine,
        size=size,
        block=block,
        depth=options.depth,
        pairs=options.pairs,
        verify=not options.no_verify,
    )
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
