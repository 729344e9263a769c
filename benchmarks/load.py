"""Loads a checkpoint: at another number of ranks, beside reading and writing its bytes; and of 1.5B parameters within a cap.

    python benchmarks/load.py DIR                     # DIR: a folder on the drive; by default the current one
    python benchmarks/load.py DIR --width 1024 --rounds 5 --json load.json
    python benchmarks/load.py DIR --large             # 1.5B with Adam within 2.5 GiB: 45 GB of the drive, and minutes
    python benchmarks/load.py --docs benchmarks/results/load*.json     # measure nothing: write the tables in docs/

A GPT in bf16 with fp32 master copies and AdamW, everything on the drive. One process saves; two load, each onto a model on meta,
in turns with fio, of which one process reads as many bytes while another writes as many to a fresh file. Without fio, a copy by
this package's own I/O engine takes its place: eight requests of 1 MiB read, as many written.

`--large`: the process that trains and saves, and the new one that loads and goes on, have RLIMIT_DATA of 2.5 GiB. Peaks are of
anonymous memory, of the save and of the load each beside that of training in the same process; the loss of the step after the
save and of that after the load must be the same number.
"""

from __future__ import annotations

import argparse
import collections
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _docs
import _fio
from tabulate import tabulate

from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.storage.engine import Engine, File, Request

WORKER = Path(__file__).parent / "_load_worker.py"
LARGE = {"layers": 48, "width": 1600, "heads": 25, "vocabulary": 50257, "length": 128}
"""1.56B parameters: GPT-2 XL."""
CAP = int(2.5 * 2**30)
BLOCK, DEPTH = 1 << 20, 8
GOAL, GOAL_MIB = 1.3, 128


def run(do: str, folder: Path, model: dict[str, int], *, world: int = 1, cap: int = 0) -> list[list[dict[str, Any]]]:
    """Run the ranks of a worker; return the lines of each."""
    with tempfile.TemporaryDirectory(dir=folder) as drive:
        settings = {"do": do, "model": model, "cap": cap, "drive": drive, "saved": str(folder / "saved"), "world": world}
        commands = [[sys.executable, str(WORKER), json.dumps(settings | {"rank": rank})] for rank in range(world)]
        ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        said = [rank.communicate()[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"a rank of {do!r} failed; see above")
    return [[json.loads(line) for line in lines.splitlines()] for lines in said]


def slowest(ranks: list[list[dict[str, Any]]], phase: str) -> float:
    """Return the seconds of a phase on the rank that took the longest."""
    return float(max(line["s"] for said in ranks for line in said if line.get("phase") == phase))


def saved_bytes(folder: Path) -> list[Path]:
    """Return the files of tensors of a checkpoint, the largest first."""
    return sorted((folder / "saved").glob("*/*.safetensors"), key=lambda path: -path.stat().st_size)


def by_fio(folder: Path) -> float:
    """Return the seconds in which fio reads the checkpoint's bytes and writes as many at once."""
    size = sum(path.stat().st_size for path in saved_bytes(folder))
    source, target = folder / "fio-read", folder / "fio-write"
    if not source.exists():
        _fio.seconds(_fio.fresh(source, size))
    found = _fio.seconds(_fio.job(source, size, "read"), _fio.job(target, size, "write", "--fallocate=none"))
    target.unlink()
    return found


def by_copy(folder: Path) -> float:
    """Return the seconds in which the I/O engine copies the checkpoint's files, whole blocks of them, past the page cache."""
    target = folder / "copy"
    blocks = [(path, at) for path in saved_bytes(folder) for at in range(0, path.stat().st_size - BLOCK + 1, BLOCK)]
    began = time.perf_counter()
    with Engine() as engine, File(target, write=True) as file:
        sources: dict[Path, File] = {}
        buffers = [aligned_buffer(BLOCK) for _ in range(2 * DEPTH)]
        reading: collections.deque[tuple[Request, int]] = collections.deque()
        writing: dict[int, Request] = {}
        done = 0
        for number in range(len(blocks) + DEPTH):
            if number < len(blocks):
                path, at = blocks[number]
                slot = number % len(buffers)
                if slot in writing:
                    writing.pop(slot).wait()
                source = sources.setdefault(path, File(path) if path not in sources else sources[path])
                reading.append((engine.read(source, at, buffers[slot]), slot))
            if number >= DEPTH:
                request, slot = reading.popleft()
                request.wait()
                writing[slot] = engine.write(file, done, buffers[slot])
                done += BLOCK
        for request in writing.values():
            request.wait()
    seconds = time.perf_counter() - began
    target.unlink()
    return seconds


def elsewhere(folder: Path, width: int, rounds: int) -> dict[str, Any]:
    """Save by one process, load by two in turns with a copy of as many bytes; return the median seconds of each.

    A load takes as long as on the slower of the two.
    """
    model = {"layers": 12, "width": width, "heads": width // 64, "vocabulary": 8192, "length": 128}
    run("save", folder, model)
    other = by_fio if shutil.which("fio") else by_copy
    seconds: dict[str, list[float]] = {"load": [], "copy": []}
    for number in range(rounds):
        for name in ("load", "copy") if number % 2 else ("copy", "load"):
            if name == "copy":
                seconds[name].append(other(folder))
            else:
                seconds[name].append(slowest(run("only load", folder, model, world=2), "load"))
    size = sum(path.stat().st_size for path in saved_bytes(folder))
    found: dict[str, Any] = {name: statistics.median(values) for name, values in seconds.items()}
    return {"bytes": size, "by": "fio" if other is by_fio else "copy", "all": seconds, **found}


def large(folder: Path) -> dict[str, Any]:
    """Train and save, load and go on, within the cap; return what both processes say."""
    (trained,), (loaded,) = (run(do, folder, LARGE, cap=CAP) for do in ("save", "load"))
    expected, found = ([line["loss"] for line in said if "loss" in line][-1] for said in (trained, loaded))
    if expected != found:
        raise SystemExit(f"the loss after the load is {found}, after the save it was {expected}")
    size = sum(path.stat().st_size for path in saved_bytes(folder))
    return {"bytes": size, "saved": trained, "loaded": loaded}


def report(result: dict[str, Any]) -> str:
    """Return the table of a run."""
    if "saved" in result:
        phases = [(process, line) for process in ("saved", "loaded") for line in result[process] if "phase" in line]
        rows = [[process, line["phase"], f"{line['s']:.0f}", f"{line['peak_bytes'] / 2**20:,.0f}"] for process, line in phases]
        heads = ["process that", f"1.56B parameters, {result['bytes'] / 1e9:.1f} GB saved", "s", "peak MiB of 2,560"]
        peaks = {(process, line["phase"]): line["peak_bytes"] / 2**20 for process, line in phases}
        saving = peaks["saved", "save, beside a step"] - peaks["saved", "train"]
        loading = peaks["loaded", "load"] - peaks["loaded", "train"]
        line = f"peak beside the save above training's: {saving:,.0f} MiB, target at most {GOAL_MIB}: {_met(saving <= GOAL_MIB)}"
        line += (
            f"\n- peak of the load above training's: {loading:,.0f} MiB, target at most {GOAL_MIB}: {_met(loading <= GOAL_MIB)}"
        )
    else:
        found = [["load on two ranks", result["load"]], [f"read and write by {result['by']}", result["copy"]]]
        rows = [[name, f"{s:.2f}", f"{result['bytes'] / s / 1e9:.2f}", f"{result['load'] / s:.2f}"] for name, s in found]
        heads = [f"{result['bytes'] / 1e9:.2f} GB, saved by one rank", "s", "GB/s", "load / it"]
        ratio = result["load"] / result["copy"]
        line = f"load / {found[1][0]}: {ratio:.2f}, target at most {GOAL}: {_met(ratio <= GOAL)}"
    return f"{tabulate(rows, headers=heads, tablefmt='github', disable_numparse=True)}\n\n- {line}"


def _met(good: bool) -> str:
    return "met" if good else "missed"


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    parser.add_argument("--width", type=int, default=1024, help="of the model that other ranks load; 12 layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, nargs="+", metavar="FILE", help="measure nothing; write the tables in docs/")
    args = parser.parse_args()
    if args.docs is not None:
        _docs.write("benchmarks/load.py", report, args.docs)
        return
    with tempfile.TemporaryDirectory(dir=args.folder.resolve()) as folder:
        found = large(Path(folder)) if args.large else elsewhere(Path(folder), args.width, args.rounds)
    print(report(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
