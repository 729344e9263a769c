"""Saving a checkpoint, beside fio moving as many bytes and `dcp.save`; and the training loop beside a save.

    python benchmarks/save.py DIR                           # DIR: a folder on the drive; by default the current one
    python benchmarks/save.py DIR --params 256M --rounds 5 --json save.json
    python benchmarks/save.py --docs benchmarks/results/save.json    # measure nothing: write its table in docs/ from kept numbers

The model's parameters and Adam's two moments are saved: 12 bytes per parameter. From memory: fio writes fresh files, not
preallocated, with `end_fsync=1`; `torch.distributed.checkpoint` has two threads and `sync_files=True`. From a drive to itself:
fio reads as many bytes as it writes, at once. They take turns, and who goes first changes; medians count, and ratios of them.

Beside the loop, with all states on the drive: how long `save` keeps the loop waiting, right after a step and once its updates are
through; how long the step after it takes; and how long fio takes for the bytes of both, those that the kernel has counted, read
and written at once. Once with layers of next to no arithmetic, once with a GPT of 354M parameters at 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import _docs
import _fio
import _save_runs
import torch
from tabulate import tabulate

import zinf_compile

GOALS = {"memory": 1.15, "drive": 1.15, "waits": 0.05, "beside layers": 1.15, "beside a GPT": 1.25}


def ratios(result: dict[str, Any]) -> list[tuple[str, float, float, str]]:
    """Return for each measure what it is, its value, the goal, and what it was computed from."""
    memory, drive = ({name: _median(s) for name, s in result[kind]["seconds"].items()} for kind in ("memory", "drive"))
    rows = [
        (
            f"save of {result['memory']['bytes'] / 1e9:.2f} GB from memory / fio's write",
            memory["save"] / memory["fio"],
            GOALS["memory"],
            f"{memory['save']:.2f} s, {memory['fio']:.2f} s",
        ),
        ("save from memory / `dcp.save`", memory["save"] / memory["dcp"], 1.0, f"{memory['save']:.2f} s, {memory['dcp']:.2f} s"),
        (
            f"save of {result['drive']['bytes'] / 1e9:.2f} GB from the drive / fio's read and write",
            drive["save"] / drive["fio"],
            GOALS["drive"],
            f"{drive['save']:.2f} s, {drive['fio']:.2f} s",
        ),
    ]
    for kind, name in (("layers", "layers"), ("gpt", "a GPT")):
        if kind not in result:
            continue
        loop = {each: _median(s) for each, s in result[kind]["seconds"].items()}
        rows.append((
            f"`save` keeps the loop waiting / step, {name}", loop["save"] / loop["step"], GOALS["waits"],
            f"{1e3 * loop['save']:.0f} ms, {loop['step']:.2f} s",
        ))  # fmt: skip
        if "at once" in loop:
            rows.append((
                f"`save` right after a step, beside its deferred updates / step, {name}", loop["at once"] / loop["step"],
                GOALS["waits"], f"{1e3 * loop['at once']:.0f} ms, {loop['step']:.2f} s",
            ))  # fmt: skip
        both = loop["beside"] + loop["rest"]  # `step`, too, is until nothing of it is left to do
        if kind == "layers":
            limit = max(loop["step"], loop["drive"])
            what = f"step and save, {name} / the larger of the step and fio's time for the bytes of both"
        else:
            limit = loop["step"]
            what = "step and save, a GPT of 354M at 1,024 tokens / step"
        rows.append((what, both / limit, GOALS[f"beside {name}"], f"{both:.2f} s, {limit:.2f} s"))
    return rows


def report(result: dict[str, Any]) -> str:
    """Return the table of a run."""
    rows = [[what, f"{value:.2f}", f"{goal:.2f}", text] for what, value, goal, text in ratios(result)]
    table = tabulate(rows, headers=["ratio", "measured", "at most", "medians"], tablefmt="github", disable_numparse=True)
    gpt = f" ({len(result['gpt']['seconds']['step'])} with the GPT)" if "gpt" in result else ""
    return f"Medians of {result['rounds']} rounds{gpt}, on {result['threads']} threads, {result['fio']}:\n\n{table}"


def _median(values: list[float]) -> float:
    return statistics.median(values)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    parser.add_argument("--params", default="256M", help="parameters of the layers, in millions with M (default 256M)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-gpt", action="store_true", help="leave out the GPT of 354M parameters, which takes minutes")
    parser.add_argument("--announce", action="store_true", help="reserve space for the saves beside the layers' training")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, metavar="FILE", help="measure nothing; write the table in docs/ from this file")
    args = parser.parse_args()
    if args.docs is not None:
        _docs.write("benchmarks/save.py", report, [args.docs])
        return
    said = _fio.version()
    params = round(float(args.params.removesuffix("M")) * (1e6 if args.params.endswith("M") else 1))
    result: dict[str, Any] = {
        "params": params,
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
        "fio": f"{said}, {_fio.engine()}",
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        drive = Path(folder)
        result["memory"] = _save_runs.from_memory(drive, params, args.rounds)
        result["drive"] = _save_runs.from_drive(drive, params, args.rounds)
        result["layers"] = _save_runs.beside_layers(drive, params, args.rounds, announce=args.announce)
        if not args.no_gpt:
            result["gpt"] = _save_runs.beside_gpt(drive, args.rounds)
        zinf_compile.reset()
    print(report(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
