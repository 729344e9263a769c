"""Overhead of the executor: a program of many small regions, compared with calling the same regions one after the other.

    python benchmarks/overhead.py                       # a GPT of 48 tiny blocks, each a region
    python benchmarks/overhead.py --json overhead.json  # keep the numbers

One rank, so that every transfer is empty: what is left is the time spent between regions, on binding parameters, on passing
values on and on wrapping gradients. The baseline is a Python function written out line by line, `r7, r8 = region3([r5, r2])`,
which frees each value where the program does: less than that no schedule in Python can cost. Both take turns on one thread, whose
CPU time is taken (on an idle machine the wall time, on a busy one without the waits for a core); medians count. The limit is
30 us per region.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from zinf_compile.backend.graph_compiler import Compiled, GraphCompiler
from zinf_compile.cli.models import GPT
from zinf_compile.config import Config
from zinf_compile.ir.program import Program
from zinf_compile.ir.steps import Reduce, Region, Wait
from zinf_compile.runtime.context import Context
from zinf_compile.sharded.parameter import unit_behind

BLOCKS, WIDTH, LENGTH = 48, 16, 4
BUCKET_BYTES = 4096
"""Smaller than a block, and larger than its largest parameter: several regions to a block."""
LIMIT_US = 30.0

Call = tuple[Program, Compiled, list[Any]]
"""A program, what runs it as a user's step does, and the arguments of one call."""


class Recorder(GraphCompiler):
    """Compiles as the backend does, and keeps each program with the arguments of its last call."""

    calls: dict[str, Call]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.calls = {}

    def finish(self, program: Program, context: Context) -> Compiled:
        """Keep the arguments, then run."""
        run = super().finish(program, context)

        def recorded(args: list[Any]) -> list[Any]:
            self.calls[program.name.split()[0]] = (program, run, list(args))
            return run(args)  # type: ignore[no-any-return]

        recorded._boxed_call = True  # type: ignore[attr-defined]
        return recorded


def record(compute: str) -> dict[str, Call]:
    """Train one step; return the calls made, by kind of graph."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = GPT(layers=BLOCKS, width=WIDTH, heads=2, vocabulary=32, length=LENGTH)
    recorder = Recorder(Config(compute=compute, bucket=BUCKET_BYTES))
    compiled = torch.compile(model, backend=recorder.compile)
    tokens = torch.randint(32, (1, LENGTH))
    compiled(tokens, tokens).backward()
    return recorder.calls


def straight_line(program: Program) -> Callable[[Sequence[Any]], list[Any]]:
    """Write the program's regions out as one function of its arguments, in which the parameters are whole."""
    names: dict[str, Any] = {}
    renamed: dict[int, str] = {}
    lines = [f"def run(args):\n    {''.join(f'r{r}, ' for r in range(program.inputs))} = args; args.clear()"]

    def at(register: int) -> str:
        return renamed.get(register, f"r{register}")

    for number, (step, frees) in enumerate(zip(program.steps, program.frees, strict=True)):
        match step:
            case Region(fn, inputs, outputs):
                names[f"region{number}"] = fn
                lines.append(f"    v = [{', '.join(map(at, inputs))}]")
                lines += [f"    {at(r)} = None" for r in frees if r in inputs]
                lines.append(f"    {''.join(f'{at(r)}, ' for r in outputs)} = region{number}(v)")
                lines += [f"    {at(r)} = None" for r in frees if r not in inputs]
            case Wait(handle, out):
                renamed[out] = at(handle)
            case Reduce(_, members):
                renamed.update((out, at(grad)) for grad, _, out, _ in members)
            case _:  # a gather: what it would fill is there; a release: nothing to free
                renamed.update((out, at(unit)) for unit, out in getattr(step, "members", ()))
    for register, value in program.constants.items():
        names[f"r{register}"] = value
    lines.append(f"    return [{', '.join('None' if r is None else at(r) for r in program.outputs)}]")
    exec("\n".join(lines), names)
    run: Callable[[Sequence[Any]], list[Any]] = names["run"]
    return run


def measure(call: Call, *, rounds: int) -> dict[str, Any]:
    """Run both in turn; return their medians and the difference per region."""
    program, run, args = call
    straight = straight_line(program)
    whole = [unit.whole() if r in program.slots and (unit := unit_behind(a)) else a for r, a in enumerate(args)]
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for _ in range(rounds):
            times[0].append(_seconds(straight, list(whole)))
            times[1].append(_seconds(run, list(args)))
    plain_s, program_s = map(statistics.median, times)
    regions = sum(isinstance(step, Region) for step in program.steps)
    return {
        "regions": regions,
        "parameters": len(program.slots),
        "transfers": len(program.steps) - regions,
        "plain_ms": 1e3 * plain_s,
        "program_ms": 1e3 * program_s,
        "overhead_us_per_region": 1e6 * (program_s - plain_s) / regions,
    }


def _seconds(run: Callable[[list[Any]], object], args: list[Any]) -> float:
    start = time.thread_time()
    run(args)
    return time.thread_time() - start


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text."""
    headers = {
        "compute": "compute", "graph": "graph", "regions": "regions", "parameters": "parameters",
        "transfers": "transfer steps",
        "plain_ms": "regions alone ms", "program_ms": "program ms", "overhead_us_per_region": "overhead us per region",
    }  # fmt: skip
    return tabulate([{headers[key]: row[key] for key in headers} for row in rows], "keys", "github", floatfmt=".2f")


def main() -> int:
    """Measure, print, keep; fail above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for compute in ("fx", "inductor"):
        for graph, call in record(compute).items():
            rows.append({"compute": compute, "graph": graph, **measure(call, rounds=options.rounds)})
    print(report(rows))
    if options.json:
        options.json.write_text(json.dumps({"limit_us": LIMIT_US, "rounds": options.rounds, "rows": rows}, indent=1) + "\n")
    return int(any(row["overhead_us_per_region"] > LIMIT_US for row in rows))


if __name__ == "__main__":
    sys.exit(main())
