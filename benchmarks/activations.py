"""Saved values kept, moved or made again: the longest sequence, steps behind slow links, peaks, the planner, a step on a drive.

    python benchmarks/activations.py DIR --row length     # the longest sequence of a 124M GPT within 3 GiB, states on DIR's drive
    python benchmarks/activations.py DIR --row step       # a step at half the memory, behind links; --ratios 500 for one of them
    python benchmarks/activations.py DIR --row peak       # measured beside predicted peaks
    python benchmarks/activations.py DIR --row planner    # CPU seconds that the decision for 80 layers takes
    python benchmarks/activations.py DIR --row drive      # a step with all values on DIR's drive
    python benchmarks/activations.py DIR --row ROW --json FILE      # keep the numbers; those of `step` and `length` join FILE's
    python benchmarks/activations.py --docs FILE...       # measure nothing: write the tables in docs/ from kept numbers

length: ours all with states on the drive, losses in chunks and one cap; lengths are doubled, then halved. Whether one fits, the
plan says on tensors without values; then one step is taken on the longest, in a process of its own, whose growth is sampled:
memory that is its alone. Eager PyTorch has no plan: each length is trained on.

step: half of the smallest cap with which all is kept; the CPU plays a device behind two links, which move a byte in the time of
so many floating-point operations. The bound: what has to leave has left when the forward ends, and comes back beside a backward
that runs blocks again.

peak: PyTorch's allocator, by its own events, and the runtime's arenas, at the smallest cap that works.

drive: peers take steps in turn, and medians count. On this machine the device is host memory, so the drive is the far tier.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import _activation_rows as rows_of
import _docs
from _activation_rows import AUTO, CHECKPOINT, EAGER, GIB, KEEP
from _peers import Peer, alternate, spawn, table_rows
from _worker import TakeStep, serve, stepping
from tabulate import tabulate

SIZE = {"width": 768, "heads": 12, "vocabulary": 8192}
MIB = 2**20


def work(layers: int, length: int, way: str, folder: str, pipe: Any) -> None:
    """Train the GPT in this process, one step when told to; `way` is keep, nvme or checkpoint."""
    import torch  # noqa: PLC0415

    import zinf_compile  # noqa: PLC0415
    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    warnings.simplefilter("ignore")

    models: list[torch.nn.Module] = []

    def make() -> TakeStep:
        torch.manual_seed(0)
        model = GPT(**SIZE, layers=layers, length=length)
        if way == "checkpoint":
            rows_of.checkpoint_blocks(model)
        models.append(model)
        options = {"chunk_loss": True, **({"activations": "nvme", "nvme": folder} if way == "nvme" else {})}
        call = torch.compile(model, backend="zero_infinity", options=options)
        return stepping(call, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def links() -> dict[str, Any]:
        found: dict[str, Any] = zinf_compile.stats(models[0])["links"]
        return found

    tokens = torch.randint(SIZE["vocabulary"], (1, length + 1), generator=torch.Generator().manual_seed(1))
    serve(pipe, lambda: (tokens[:, :-1], tokens[:, 1:]), make, more={"links": links})


def measure(folder: str, layers: int, length: int, rounds: int) -> dict[str, Any]:
    """Have all peers take steps in turn; return their rows, and what the links of the offloading one moved."""
    peers = [Peer(way, [spawn(work, layers, length, way, folder)]) for way in ("keep", "nvme", "checkpoint")]
    (links,) = peers[1].ask("links")
    return {"rows": alternate(peers, rounds), "links": links, "layers": layers, "length": length}


def drive_report(result: dict[str, Any]) -> str:
    """Return the table, the bytes of a step, and whether bits are equal."""
    rows, links = result["rows"], result["links"]
    written, read = (links[way]["bytes_last_step"] / MIB for way in ("host to nvme", "nvme to host"))
    waited = sum(links[way]["waited_s_last_step"] for way in ("host to nvme", "nvme to host"))
    same = rows[0]["losses"] == rows[1]["losses"]
    headers = ["activations", "step s", "/ keep", "CPU s", "first step s", "peak PSS GiB"]
    return "\n\n".join(
        [
            f"A GPT of {result['layers']} blocks, one sequence of {result['length']:,} tokens:",
            tabulate(table_rows(rows), headers, "github"),
            f"- the first step wrote {written:,.0f} MiB and read {read:,.0f} MiB; compute stood still {waited:.2f} s for them",
            f"- losses of nvme and keep: {'equal to the bit' if same else 'DIFFERENT'}",
        ]
    )


GOALS = {KEEP: 4.0, CHECKPOINT: 1.5}
"""How many times as long a sequence as with these ways auto should reach."""
NEAR_BOUND = 1.10
PEAK = (0.9, 1.0)
PLANNER_S = 20.0
RATIOS = (500.0, 2000.0, 7000.0)


def met(reached: bool) -> str:
    """Return the word for a goal."""
    return "met" if reached else "missed"


def length_report(result: dict[str, Any]) -> str:
    """Return the longest sequences, and how many times as long ours is."""
    cells = []
    for row in result["rows"]:
        step = row["step"] or {}
        saved = step.get("saved", {})
        kept = ", ".join(f"{where} {size / GIB:.2f}" for where, size in saved.items() if size and where != "peak")
        seconds = f"{step['step_s']:.0f}" if step else ""
        cells.append([row["way"], f"{row['length']:,}", seconds, f"{step['grown_bytes'] / GIB:.2f}" if step else "", kept])
    headers = ["activations", "tokens", "first step s", "process grew by GiB", "saved values, GiB"]
    found = {row["way"]: row["length"] for row in result["rows"]}
    lines = []
    for way, goal in GOALS.items():
        if found.get(way) and AUTO in found:
            ratio = found[AUTO] / found[way]
            text = f"- {AUTO} / {way}: {ratio:.2f}, target at least {goal}: {met(ratio >= goal)}"
            lines.append(text + ("; no longer ones were tried" if found[AUTO] == result["most"] else ""))
    title = (
        f"One sequence of a 124M GPT within {result['cap'] / GIB:g} GiB, in steps of {result['step']:,} tokens, at most "
        f"{result['most']:,}; a process may grow by {rows_of.RESERVE >> 20} MiB more, for compiled code:"
    )
    return "\n\n".join([title, tabulate(cells, headers, "github", disable_numparse=True), "\n".join(lines)])


def step_report(result: dict[str, Any]) -> str:
    """Return steps beside the bound, for each ratio."""
    cells, lines = [], []
    for case in sorted(result["cases"], key=lambda each: float(each["ratio"])):
        least = rows_of.least_seconds(case)
        by_way = {row["peer"]: row["step_s"] for row in case["rows"]}
        step, kept = by_way[AUTO], by_way[KEEP]
        decided = ", ".join(
            f"{where} {size / case['saved']:.0%}" for where, size in case["decided"].items() if size and where != "peak"
        )
        ways = [f"{by_way[way]:.2f}" for way in (KEEP, CHECKPOINT, AUTO)]
        waited = sum(case["waited"].values())
        cells.append(
            [
                f"{case['ratio']:,.0f}",
                *ways,
                f"{step / kept:.2f}",
                f"{least:.2f}",
                f"{step / least:.2f}",
                f"{waited:.2f}",
                decided,
            ]
        )
        slower = step > by_way[CHECKPOINT]
        text = f"- {case['ratio']:,.0f}: step / bound {step / least:.2f}, target at most {NEAR_BOUND}: "
        text += f"{met(step <= NEAR_BOUND * least)}; not slower than checkpointing every block: {met(not slower)}"
        lines.append(text)
    headers = [
        "FLOP per byte",
        "keep s",
        "checkpoint s",
        "auto s",
        "auto / keep",
        "bound s",
        "auto / bound",
        "waited s",
        "saved values",
    ]
    size = rows_of.STEP_SIZE
    title = (
        f"A GPT of {size['layers']} blocks and width {size['width']}, {rows_of.BATCH} x {size['length']:,} tokens, at half of "
        "the memory that keeping takes, medians:"
    )
    return "\n\n".join([title, tabulate(cells, headers, "github", disable_numparse=True), "\n".join(lines)])


def peak_report(result: dict[str, Any]) -> str:
    """Return measured beside predicted peaks."""
    rows = [(row, row["measured"] / row["predicted"]) for row in result["rows"]]
    cells = [
        [row["model"], row["activations"], f"{row['predicted']:,}", f"{row['measured']:,}", f"{ratio:.3f}"] for row, ratio in rows
    ]
    low, high = PEAK
    inside = sum(low <= ratio <= high for _, ratio in rows)
    over = sum(ratio > high for _, ratio in rows)
    goal = f"- within {low} to {high} in {inside} of {len(rows)}, beyond the budget in {over}: {met(inside == len(rows))}"
    table = tabulate(
        cells, ["model", "activations", "budget B", "measured B", "measured / budget"], "github", disable_numparse=True
    )
    return f"The smallest budget that works, and the peak of a step of two micro-batches:\n\n{table}\n\n{goal}"


def planner_report(result: dict[str, Any]) -> str:
    """Return the CPU seconds of the decision."""
    lines = []
    for row in result["rows"]:
        total = sum(row["saved"].values())
        decided = ", ".join(f"{where} {size / total:.0%}" for where, size in row["saved"].items() if size)
        lines.append(
            f"- states {row['homes']}: {row['decided_s']:.1f} CPU s of {row['all_s']:.1f} for the whole trace, target at most "
            f"{PLANNER_S:g}: {met(row['decided_s'] <= PLANNER_S)}; {decided}"
        )
    return "What becomes of the saved values of Llama 70B, 80 layers and 2,048 tokens, within 64 GiB:\n\n" + "\n".join(lines)


REPORTS = {
    "length": length_report,
    "step": step_report,
    "peak": peak_report,
    "planner": planner_report,
    "drive": drive_report,
}


def report(result: dict[str, Any]) -> str:
    """Return the text of one row's numbers."""
    return REPORTS[result["row"]](result)


def measure_row(options: argparse.Namespace) -> dict[str, Any]:
    """Return a row's numbers; rows of `step` and `length` that were kept and aren't measured again stay."""
    if options.row == "drive":
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            return {"row": "drive", **measure(folder, options.layers, options.length, options.rounds)}
    if options.row == "peak":
        return {"row": "peak", "rows": rows_of.peaks(tuple(options.models.split(",")))}
    if options.row == "planner":
        return {"row": "planner", "rows": [rows_of.ask(rows_of.plan_deep, homes) for homes in ("host", "auto")]}
    if options.row == "step":
        ratios = [float(ratio) for ratio in options.ratios.split(",")]
        cases = [rows_of.steps_behind(ratio, options.rounds) for ratio in ratios]
        others = [case for case in _kept(options.json).get("cases", []) if case["ratio"] not in ratios]
        return {"row": "step", "cases": others + cases}
    ways, cap = options.ways.split(","), int(options.cap * GIB)
    new = [rows_of.longest(way, cap, step=options.step, most=options.most, folder=options.folder) for way in ways]
    found = {row["way"]: row for row in [*_kept(options.json).get("rows", []), *new]}
    rows = [found[way] for way in (EAGER, KEEP, CHECKPOINT, AUTO) if way in found]
    return {"row": "length", "cap": cap, "step": options.step, "most": options.most, "rows": rows}


def _kept(file: Path | None) -> dict[str, Any]:
    """Return what a file has from earlier runs."""
    found: dict[str, Any] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    return found


def main() -> int:
    """Measure, print, keep; fail where bits differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".")
    parser.add_argument("--row", choices=tuple(REPORTS), default="drive")
    parser.add_argument("--layers", type=int, default=12, help="drive")
    parser.add_argument("--length", type=int, default=2048, help="drive")
    parser.add_argument("--rounds", type=int, default=2, help="drive and step")
    parser.add_argument("--ratios", default=",".join(f"{ratio:g}" for ratio in RATIOS), help="step: operations per byte")
    parser.add_argument("--models", default="gpt,wide,experts", help="peak")
    parser.add_argument("--ways", default=",".join((EAGER, KEEP, CHECKPOINT, AUTO)), help="length")
    parser.add_argument("--cap", type=float, default=3.0, help="length: GiB")
    parser.add_argument("--step", type=int, default=1024, help="length: tokens between lengths that are tried")
    parser.add_argument("--most", type=int, default=16384, help="length: tokens")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.docs:
        _docs.write("benchmarks/activations.py", report, options.docs)
        return 0
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    result = measure_row(options)
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(options.row == "drive" and result["rows"][0]["losses"] != result["rows"][1]["losses"])


if __name__ == "__main__":
    raise SystemExit(main())
