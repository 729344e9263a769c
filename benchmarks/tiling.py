"""Memory-centric tiling: the largest layer that trains within a budget, by how many tiles it is cut into, and what tiles cost.

    python benchmarks/tiling.py DIR                  # states on a drive at DIR; 256 MiB of the device
    python benchmarks/tiling.py DIR --json FILE      # keep the numbers
    python benchmarks/tiling.py --docs FILE          # measure nothing: write its table in docs/ from kept numbers

The layer is ZeRO-Infinity's (its figure 6b): two linear ones, from a hidden size to four times as much and back. For each number
of tiles the largest hidden size that fits is found by planning on tensors without values, and then trained for a step, in which
the runtime's own account holds the budget. On this machine the device is host memory; a chunk of the optimizer's step is in the
budget too. The paper went from a hidden size of 8K to one of 64K with 16 tiles, on a V100 of 32 GB that was fragmented into
pieces of 2 GB: it stands beside ours for the shape of the curve, not for the sizes.

The time is that of a step of a GPT whose matrices are all cut into tiles, all in memory, beside the same without tiles; they take
steps in turn, and medians count. The target is 1.10.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, TypedDict

import _docs
from _peers import Peer, alternate, spawn, table_rows
from _worker import TakeStep, serve, stepping
from tabulate import tabulate

MIB = 2**20
BUDGET = 256 * MIB
FACTORS = (1, 2, 4, 8, 16)
PAPER = {1: "8K", 16: "64K"}
"""Section 8.5; the numbers between are in a picture only."""
STEP = 64
"""Between hidden sizes that are tried."""
ROWS = 64
TIME_LIMIT = 1.10

SIZE = {"layers": 4, "width": 768, "heads": 12, "vocabulary": 8192, "length": 512}
TILE = 3 * 768 * 768
"""Bytes: a quarter of the smallest matrix but one."""


class Found(TypedDict):
    """One number of tiles."""

    tiles: int
    hidden: int
    weight_bytes: int
    held_bytes: int
    """The most that the device held during the step."""
    paper: str


def layer(hidden: int) -> Any:
    """Return the model."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(torch.relu(self.up(x)))
            return out

    return Layer()


def options_of(hidden: int, factor: int, folder: str) -> dict[str, Any]:
    """Return the options that cut the layer's matrices into `factor` tiles."""
    states = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
    return {"compute": "fx", "device_memory": BUDGET, "tile": -(-16 * hidden * hidden // factor), "nvme": folder, **states}


def fits(hidden: int, factor: int, folder: str) -> bool:
    """Say whether the plan is within the budget."""
    import torch  # noqa: PLC0415

    from zinf_compile.cli.trace import trace  # noqa: PLC0415
    from zinf_compile.errors import BudgetError  # noqa: PLC0415

    try:
        trace(lambda: (layer(hidden), (torch.zeros(ROWS, hidden),)), options=options_of(hidden, factor, folder))
    except BudgetError:
        return False
    return True


def largest(factor: int, folder: str) -> int:
    """Return the largest hidden size, in steps."""
    low, high = 1, 2
    while fits(STEP * high, factor, folder):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(STEP * middle, factor, folder) else (low, middle)
    return STEP * low


def train(hidden: int, factor: int, folder: str, pipe: Any) -> None:
    """Take a step in this process; send the most that the device held."""
    import torch  # noqa: PLC0415

    import zinf_compile  # noqa: PLC0415

    warnings.simplefilter("ignore")
    model = layer(hidden)
    model.compile(backend="zero_infinity", options=options_of(hidden, factor, folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.randn(ROWS, hidden)).square().mean().backward()
    optimizer.step()
    zinf_compile.synchronize()
    pipe.send(zinf_compile.stats(model)["memory"]["device"]["peak"]["all"])


def measure(folder: str) -> list[Found]:
    """Find and train the largest layer for each number of tiles."""
    found: list[Found] = []
    for factor in FACTORS:
        hidden = largest(factor, folder)
        process = spawn(train, hidden, factor, folder)
        held = process.pipe.recv()
        process.join(60)
        found.append(
            Found(tiles=factor, hidden=hidden, weight_bytes=16 * hidden**2, held_bytes=held, paper=PAPER.get(factor, ""))
        )
        print(found[-1], flush=True)
    return found


def work(tile: int | None, pipe: Any) -> None:
    """Train the GPT in this process, one step when told to."""
    import torch  # noqa: PLC0415

    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    warnings.simplefilter("ignore")

    def make() -> TakeStep:
        torch.manual_seed(0)
        model = GPT(**SIZE)
        call = torch.compile(model, backend="zero_infinity", options={"tile": tile})
        return stepping(call, torch.optim.AdamW(model.parameters(), lr=1e-4))

    tokens = torch.randint(SIZE["vocabulary"], (2, SIZE["length"] + 1), generator=torch.Generator().manual_seed(1))
    serve(pipe, lambda: (tokens[:, :-1], tokens[:, 1:]), make)


def report(result: dict[str, Any]) -> str:
    """Return both tables, and whether the target is met."""
    table = [
        [f["tiles"], f"{f['hidden']:,}", f"{f['weight_bytes'] / BUDGET:.2f}", f"{f['held_bytes'] / MIB:,.0f}", f["paper"]]
        for f in result["found"]
    ]
    headers = ["tiles", "hidden size", "a matrix / budget", "held MiB", "paper, V100"]
    step_headers = ["peer", "step s", "/ whole", "CPU s", "first step s", "peak PSS GiB"]
    ratio = slowdown(result)
    return "\n\n".join(
        [
            f"Largest hidden size that trains within {BUDGET // MIB} MiB of the device, states on a drive:",
            tabulate(table, headers, "github", disable_numparse=True),
            f"A GPT's step in tiles of {TILE / MIB:.1f} MiB, medians of {result['rounds']} steps:",
            tabulate(table_rows(result["rows"]), step_headers, "github"),
            f"- in tiles / whole: {ratio:.2f}, target at most {TIME_LIMIT}: {'met' if ratio <= TIME_LIMIT else 'missed'}",
        ]
    )


def slowdown(result: dict[str, Any]) -> float:
    """Return the time of a step in tiles, as a multiple of one without."""
    whole, tiled = result["rows"]
    ratio: float = tiled["step_s"] / whole["step_s"]
    return ratio


def main() -> int:
    """Measure, print, keep; fail beyond the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.docs:
        _docs.write("benchmarks/tiling.py", report, options.docs)
        return 0
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(folder)
    rows = alternate([Peer("whole", [spawn(work, None)]), Peer("in tiles", [spawn(work, TILE)])], options.rounds)
    result = {"found": found, "budget_bytes": BUDGET, "rows": rows, "rounds": options.rounds}
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(slowdown(result) > TIME_LIMIT or any(f["held_bytes"] > BUDGET for f in found))


if __name__ == "__main__":
    sys.exit(main())
