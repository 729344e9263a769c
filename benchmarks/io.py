"""The store beside fio, on the same file: bytes per second and CPU seconds per GB of writes, reads, and half of each.

    python benchmarks/io.py DIR                    # DIR: a folder on the drive; by default the current one
    python benchmarks/io.py DIR --json io.json     # keep the numbers
    python benchmarks/io.py --readme io.json       # measure nothing: write the README's table from kept numbers

Both move the file from its start to its end with direct I/O, the same block size and as many blocks at a time; they take turns,
and who goes first changes, so that a busy machine is busy for both. fio uses the engine that was the faster one here, the store
computes and verifies checksums. What counts are the ratios of medians. Two numbers say what of the CPU time is the checksums':
that of a third contestant, the store without them, and that of one pass over what has just arrived (`torch.amax`, timed in the
same run), which is what any check of what was read has to make.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import _fio
import _readme
import torch
from _fio import Sample
from tabulate import tabulate

from zinf_compile.config import parse_bytes
from zinf_compile.runtime.aio import Engine
from zinf_compile.runtime.buffers import aligned_buffer
from zinf_compile.runtime.filesystem import look_up
from zinf_compile.runtime.store import Store, Transfer

MODES = ("write", "read", "both")
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


def measure(folder: str, *, engine: str, size: int, block: int, depth: int, pairs: int, verify: bool) -> dict[str, Any]:
    """Alternate fio and the store; return the numbers."""
    size -= size % (2 * EXTENT_BYTES)
    version, place = _fio.version(), look_up(folder)
    shards = Shards(folder, size, engine=engine, block=block, depth=depth, verify=verify)
    bare = Shards(folder, size, engine=engine, block=block, depth=depth, verify=False)
    bare.run("write")

    def run_fio(engine: str, mode: str) -> Sample:
        return _fio.run(engine, mode, fd=shards.file.fd, size=size, block=block, depth=depth)

    rows = []
    for mode in MODES:
        shards.run("write")  # what fio wrote is not what the store's checksums expect
        best = max(_fio.ENGINES, key=lambda engine: run_fio(engine, mode).bytes_per_s)
        samples: dict[str, list[Sample]] = {"fio": [], "zinf": [], "zinf_without_checksums": []}
        for pair in range(pairs):
            turns = [
                ("fio", lambda: run_fio(best, mode)),  # noqa: B023
                ("zinf", lambda: shards.run(mode)),  # noqa: B023
                ("zinf_without_checksums", lambda: bare.run(mode)),  # noqa: B023
            ]
            for name, turn in turns if pair % 2 == 0 else reversed(turns):
                samples[name].append(turn())
                print(f"\r{mode}: pair {pair + 1} of {pairs} ", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        rows.append({"mode": mode, "fio_engine": best, "samples": samples})
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


def summarise(row: dict[str, Any]) -> dict[str, float]:
    """Return the medians of a mode and their ratios, the store's to fio's."""
    fio, zinf = (
        [statistics.median(sample[part] for sample in row["samples"][name]) for part in (0, 1)] for name in ("fio", "zinf")
    )
    return {
        "fio_gb_per_s": fio[0] / 1e9,
        "zinf_gb_per_s": zinf[0] / 1e9,
        "rate_ratio": zinf[0] / fio[0],
        "fio_cpu": fio[1],
        "zinf_cpu": zinf[1],
        "cpu_ratio": zinf[1] / fio[1],
        "bare_cpu": statistics.median(sample[1] for sample in row["samples"]["zinf_without_checksums"]),
    }


def report(result: dict[str, Any]) -> str:
    """Return a title and the table."""
    names = {"both": "half reads, half writes", "read": "reads", "write": "writes"}
    rows = [
        [
            names[row["mode"]],
            row["fio_engine"],
            *(f"{value:.3f}" if "cpu" in name else f"{value:.2f}" for name, value in found.items()),
        ]
        for row in result["rows"]
        for found in [summarise(row)]
    ]
    headers = [
        "",
        "fio engine",
        "fio GB/s",
        "store GB/s",
        "store / fio",
        "fio CPU s/GB",
        "store CPU s/GB",
        "store / fio CPU",
        "without checksums",
    ]
    checks = "checksums on" if result["checksums"] else "checksums off"
    title = (
        f"{result['size_bytes'] / 2**30:.1f} GiB on {result['filesystem']}, blocks of {result['block_bytes'] >> 10:,} KiB, "
        f"{result['depth']} at a time, engine {result['engine']}, {checks}, {result['fio']}, medians of {result['pairs']} pairs"
    )
    limit = (
        f"Limit of the CPU time of checked reads: what they take without checksums, and {result['pass_s_per_gb']:.3f} s/GB "
        "for one pass over what has arrived (torch.amax)."
    )
    return f"{title}:\n\n{tabulate(rows, headers, tablefmt='github', disable_numparse=True)}\n\n{limit}"


def verdict(result: dict[str, Any]) -> str:
    """Say which targets were met."""
    lines = []
    for row in result["rows"]:
        found = summarise(row)
        missed = [f"rate {found['rate_ratio']:.2f} < {LEAST_RATE}"] * (found["rate_ratio"] < LEAST_RATE)
        missed += [f"CPU {found['cpu_ratio']:.2f} > {MOST_CPU}"] * (found["cpu_ratio"] > MOST_CPU)
        lines.append(f"{row['mode']}: {'missed: ' + ', '.join(missed) if missed else 'met'}")
    return f"targets (rate at least {LEAST_RATE} of fio, CPU at most {MOST_CPU} of fio's): " + "; ".join(lines)


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
    parser.add_argument("--readme", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.readme:
        _readme.write("benchmarks/io.py", (report(json.loads(path.read_text())) for path in options.readme))
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
    print(report(result), verdict(result), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
