"""The largest GPT that trains within a memory cap: eager PyTorch, FSDP2, DeepSpeed's ZeRO-Infinity and this backend.

    python benchmarks/capacity.py DIR                               # DIR: a folder on the drive; by default the current one
    python benchmarks/capacity.py DIR --deepspeed-python PYTHON     # with DeepSpeed, see benchmarks/peers/README.md
    python benchmarks/capacity.py DIR --peers "zinf nvme" --width 3072        # train one size, look for no other
    python benchmarks/capacity.py DIR --peers "zinf nvme" --width 2048 --world 2 --cap 2.5
    python benchmarks/capacity.py DIR --json capacity.json          # keep the numbers
    python benchmarks/capacity.py --docs capacity.json              # measure nothing: write its table in docs/ from kept numbers

A run is three steps on one batch of one sequence of 128 tokens, whose loss must fall. It fits if what a process and its
children hold (PSS: shared pages by share, added up 20 times a second) stays within the cap, which is also its RLIMIT_DATA, and
if no more than 1 % of what is on the drive is in the page cache too. The size is found by bisection: widths in steps of 64 or
`--step`, layers in proportion (26 of width 3072), a tied vocabulary of 50,257. All compute in bf16 and update in fp32: eager
PyTorch by autocast, FSDP2 by its mixed precision, DeepSpeed by its "bf16", this backend by `master="float32"`
with gradients reduced and kept in bf16, as FSDP2's are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _docs
import _limits
from _watch import Watched, watch
from tabulate import tabulate

WORKER = Path(__file__).parent / "_capacity_worker.py"
EAGER, FSDP2, ZINF, DEEPSPEED = "eager", "fsdp2", "zinf nvme", "deepspeed nvme"
STARTS = {EAGER: 896, FSDP2: 896, DEEPSPEED: 1216, ZINF: 3072}
"""First widths of the search."""

STEP = 64
STEP_OF = {ZINF: 256}
"""Resolution of the search in width, where it isn't `STEP`: for a peer whose runs take minutes."""

STEPS = 3
LENGTH, VOCABULARY = 128, 50257
MOST_SECONDS = 1800
CACHED = 0.01
"""Fraction of the bytes on the drive that may be in the page cache."""

TARGETS = {DEEPSPEED: 10, EAGER: 14}
"""How many times a peer's largest model this backend's should be."""

READ, WRITTEN = 18, 16
"""Bytes that a step must move for each parameter: bf16 read by backward and update and written by it, its gradient written and
read, three fp32 states read and written."""


def model_of(width: int) -> dict[str, int]:
    """Return the model of a width."""
    layers = max(1, round(width * 26 / 3072))
    return {"layers": layers, "width": width, "heads": width // 64, "vocabulary": VOCABULARY, "length": LENGTH}


def parameters_of(width: int) -> int:
    """Return how many elements its parameters have, the tied ones counted once."""
    model = model_of(width)
    block = 12 * width**2 + 13 * width
    return model["layers"] * block + (VOCABULARY + LENGTH + 2) * width


def train(peer: str, width: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the steps; return the result."""
    python = options.deepspeed_python if peer == DEEPSPEED else sys.executable
    cap = int(options.cap * 2**30)
    with tempfile.TemporaryDirectory(dir=os.path.realpath(options.folder)) as folder:
        settings = {"peer": peer, "model": model_of(width), "cap": cap, "steps": STEPS, "folder": folder, "world": options.world}
        commands = [[python, str(WORKER), json.dumps(settings | {"rank": rank})] for rank in range(options.world)]
        watched = watch(commands, cap=cap, folder=folder, seconds=MOST_SECONDS)
    found = describe(watched, peer, width)
    print(f"{peer}, width {width}, {found['parameters']:,} parameters: {found['why'] or 'fits'}; {found}", file=sys.stderr)
    return found


def describe(watched: Watched, peer: str, width: int) -> dict[str, Any]:
    """Return a run as a row of numbers."""
    said = [json.loads(line) for line in watched.lines if line.startswith("{")]
    losses = [line["loss"] for line in said if "loss" in line]
    why = watched.why
    if not why and not any("over" in line for line in said):
        why = "ended early"
    if not why and not losses[-1] < losses[0]:
        sys.exit(f"{peer} doesn't learn: losses {losses}")
    if not why and watched.cached_bytes > CACHED * watched.drive_bytes:
        why = f"{watched.cached_bytes:,} bytes of what is on the drive were in the page cache"
    return {
        "peer": peer,
        "width": width,
        "parameters": parameters_of(width),
        "fits": not why,
        "why": why,
        "losses": losses,
        "built_s": next((line["built_s"] for line in said if "built_s" in line), None),
        "steps_s": [line["step_s"] for line in said if "step_s" in line],
        "peak_bytes": watched.peak_bytes,
        "drive_bytes": watched.drive_bytes,
        "cached_bytes": watched.cached_bytes,
    }


def search(start: int, step: int, fits: Callable[[int], bool]) -> int:
    """Return the largest width that fits, to within `step`; 0 where none does."""
    low, high, stride = 0, 0, max(step, 4 * STEP)
    width = start
    while not high or high - low > step:
        if fits(width):
            low = width
        else:
            high = width
        if not high:
            width += stride
        elif not low and width > stride:
            width -= stride
        else:
            width = (low + high) // (2 * STEP) * STEP
        if not width:
            return 0
    return low


def measure(peer: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the row of a peer's largest model."""
    if options.width:
        return train(peer, options.width, options)
    rows: dict[int, dict[str, Any]] = {}

    def fits(width: int) -> bool:
        rows[width] = train(peer, width, options)
        return bool(rows[width]["fits"])

    return rows.get(search(STARTS[peer], STEP_OF.get(peer, STEP), fits))


def limits(folder: str, row: dict[str, Any], world: int) -> dict[str, float]:
    """Return the least seconds of this backend's step: of its bytes at the drive's rates, of its matrix products.

    The rates are of a file as large as what the step keeps on the drive, for as long as the step takes.
    """
    moved = _limits.Traffic(READ * row["parameters"], WRITTEN * row["parameters"])
    rates = _limits.drive_rates(folder, row["drive_bytes"], max(_limits.SECONDS, *row["steps_s"][-1:]))
    flops = 6 * row["parameters"] * LENGTH * world
    return {"io_s": _limits.io_s(moved, rates), "compute_s": flops / _limits.bf16_rate()}


def report(result: dict[str, Any]) -> str:
    """Return a table and the targets."""
    rows = result["rows"]
    least = rows[0]["parameters"]
    cells = [
        [
            row["peer"],
            f"{row['parameters'] / 1e6:,.0f}M" if row["fits"] else f"not {row['parameters'] / 1e6:,.0f}M",
            f"{row['parameters'] / least:.1f}",
            f"{model_of(row['width'])['layers']} x {row['width']}",
            f"{row['peak_bytes'] / 2**30:.2f}",
            f"{row['peak_bytes'] / row['parameters']:.1f}",
            f"{row['drive_bytes'] / row['parameters']:.1f}",
            f"{row['built_s']:.1f}" if row["built_s"] else "",
            f"{row['steps_s'][-1]:.1f}" if row["steps_s"] else "",
        ]
        for row in rows
    ]
    headers = ["peer", "parameters", f"/ {rows[0]['peer']}", "layers x width", "peak GiB", "B/parameter in memory"]
    headers += ["on the drive", "made in s", "step s"]
    title = (
        f"Three steps on {result['world']} x {LENGTH} tokens, within {result['cap']} GiB for each of {result['world']} rank(s):"
    )
    parts = [title, tabulate(cells, headers, tablefmt="github", disable_numparse=True), targets(rows), bound(result)]
    return "\n\n".join(part for part in parts if part)


def targets(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each target whose peers took part."""
    largest = {row["peer"]: row["parameters"] for row in rows if row["fits"]}
    lines = []
    for peer, least in TARGETS.items():
        if ZINF in largest and peer in largest:
            found = largest[ZINF] / largest[peer]
            lines.append(f"- {ZINF} / {peer}: {found:.1f}, target at least {least}: {'met' if found >= least else 'missed'}")
    return "\n".join(lines)


def bound(result: dict[str, Any]) -> str:
    """Return what the step of this backend can't beat, and its losses."""
    row = next((row for row in result["rows"] if row["peer"] == ZINF), None)
    found = result["limits"]
    if row is None or not row["steps_s"] or found is None:
        return ""
    step, least = row["steps_s"][-1], max(found.values())
    return (
        f"{ZINF}: losses {', '.join(f'{loss:.3f}' for loss in row['losses'])}; {step:.1f} s a step, {step / least:.2f} x the "
        f"larger of {found['io_s']:.1f} s for {READ} + {WRITTEN} bytes read and written for each parameter and "
        f"{found['compute_s']:.1f} s for the matrix products, at the rates measured in this run."
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".", help="a folder on the drive")
    parser.add_argument("--deepspeed-python", metavar="PYTHON", help="the interpreter that has DeepSpeed")
    parser.add_argument("--peers", help="names separated by commas; the first is the base of the ratios")
    parser.add_argument("--cap", type=float, default=4.0, help="GiB for each rank")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--width", type=int, help="train this size, look for no other")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.docs:
        _docs.write("benchmarks/capacity.py", report, options.docs)
        return
    peers = (
        options.peers.split(",") if options.peers else [EAGER, FSDP2, *([DEEPSPEED] if options.deepspeed_python else []), ZINF]
    )
    if unknown := set(peers) - set(STARTS):
        raise SystemExit(f"no such peer: {', '.join(sorted(unknown))}; accepted: {', '.join(STARTS)}")
    if DEEPSPEED in peers and not options.deepspeed_python:
        raise SystemExit(f"{DEEPSPEED}: --deepspeed-python says where it is installed")
    rows = [row for peer in peers if (row := measure(peer, options))]
    ours = next((row for row in rows if row["peer"] == ZINF), None)
    result = {
        "cap": options.cap,
        "world": options.world,
        "rows": rows,
        "limits": limits(options.folder, ours, options.world) if ours else None,
    }
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
