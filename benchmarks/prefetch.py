"""How far to gather ahead, and how much at once: step time, overlap and memory for other values of two constants.

    python benchmarks/prefetch.py                       # five minutes on two cores
    python benchmarks/prefetch.py --json prefetch.json  # keep the numbers

Two gloo ranks of one thread hold one model and compile it once for each setting; the settings take steps in turn. Each of
LOOK_AHEAD (in `passes/__init__.py`) and `bucket` (an option) is varied while the other keeps its value. Ratios are to the values
as they stand. The share of transfer seconds beside compute is 1.00 where nothing is waited for: no schedule does better than
that. Regions run operator by operator: to compile them for each bucket would take the time for the steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

LOOK_AHEADS, BUCKETS_MIB = (0, 1, 2, 3), (8, 16, 32, 64)
WORLD, BATCH = 2, 2
MODELS: dict[str, dict[str, int]] = {
    "124M": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "length": 256},
    "11M": {"layers": 12, "width": 256, "heads": 4, "vocabulary": 4096, "length": 64},
}
ROUNDS = {"124M": 4, "11M": 20}
"""Steps of each setting: what five minutes allow."""

Setting = tuple[int, int]
"""Look-ahead in groups, bucket in MiB."""


def settings(standing: Setting) -> list[Setting]:
    """Return the values as they stand, and those that differ in one of the two."""
    look_ahead, bucket = standing
    return [
        standing,
        *((n, bucket) for n in LOOK_AHEADS if n != look_ahead),
        *((look_ahead, n) for n in BUCKETS_MIB if n != bucket),
    ]


def work(rank: int, name: str, rounds: int, rendezvous: str, answers: Any) -> None:
    """Measure all settings on one rank; answer with a row for each."""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import torch  # noqa: PLC0415  (after the environment is set)
    import torch.distributed as dist  # noqa: PLC0415

    from zinf_compile import passes  # noqa: PLC0415
    from zinf_compile.cli.models import GPT  # noqa: PLC0415
    from zinf_compile.config import Config  # noqa: PLC0415
    from zinf_compile.runtime.lanes.overlap_log import recorded  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    shape = MODELS[name]
    model = GPT(**shape)
    torch.nn.init.normal_(model.wte.weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(rank)

    def step(call: Any) -> None:
        tokens, targets = torch.randint(shape["vocabulary"], (2, BATCH, shape["length"]), generator=generator)
        call(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    standing = (passes.LOOK_AHEAD, Config().bucket_bytes // 2**20)
    torch._dynamo.config.recompile_limit = 64  # one function, compiled by a backend for each setting
    calls = []
    for look_ahead, bucket in settings(standing):
        passes.LOOK_AHEAD = look_ahead
        compiler = _compiler(Config(compute="fx", bucket=f"{bucket}MiB"))
        calls.append((compiler, torch.compile(model, backend=compiler.compile)))
        step(calls[-1][1])
    times: list[list[float]] = [[] for _ in calls]
    shares: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for number, (compiler, call) in enumerate(calls):
            with recorded(compiler.context) as log:
                start = time.perf_counter()
                step(call)
                times[number].append(time.perf_counter() - start)
            shares[number].append(log.overlapped_s() / log.transfer_s())
    answers.send(
        [
            {
                "look_ahead": look_ahead,
                "bucket_mib": bucket,
                "step_s": statistics.median(times[number]),
                "beside_compute": statistics.median(shares[number]),
                "gathered_bytes": calls[number][0].gathered_bytes,
                "steps_s": times[number],
            }
            for number, (look_ahead, bucket) in enumerate(settings(standing))
        ]
    )
    answers.recv()  # until the other rank is done, too
    dist.destroy_process_group()


def _compiler(config: Any) -> Any:
    from zinf_compile.backend.graph_compiler import GraphCompiler  # noqa: PLC0415
    from zinf_compile.passes.verify import peak_gathered_bytes  # noqa: PLC0415

    class Compiler(GraphCompiler):
        """Compiles as the backend does, and keeps what its graphs hold gathered at most."""

        gathered_bytes = 0
        context: Any = None

        def schedule(self, graph: Any, kind: str) -> Any:
            program = super().schedule(graph, kind)
            self.gathered_bytes = max(self.gathered_bytes, peak_gathered_bytes(graph.graph)[0])
            return program

        def finish(self, program: Any, context: Any) -> Any:
            self.context = context
            return super().finish(program, context)

    return Compiler(config)


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Run the ranks; return the slower one's rows."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe() for _ in range(WORLD)]
        workers = [
            context.Process(target=work, args=(rank, name, rounds, f"{folder}/ranks", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for worker in workers:
            worker.start()
        for _, theirs in pairs:
            theirs.close()  # so that a rank that dies is noticed
        try:
            by_rank = [ours.recv() for ours, _ in pairs]
        except EOFError:
            raise SystemExit("a rank ended early; what it said is above") from None
        for ours, _ in pairs:
            ours.send("done")
        for worker in workers:
            worker.join(timeout=10)
    return {
        "model": name,
        "rounds": rounds,
        "rows": [max(rows, key=lambda row: row["step_s"]) for rows in zip(*by_rank, strict=True)],
    }


def report(result: dict[str, Any]) -> str:
    """Return a title and the rows, with their ratio to the first."""
    base = result["rows"][0]
    rows = [
        [
            row["look_ahead"],
            row["bucket_mib"],
            f"{row['step_s']:.3f}",
            f"{row['step_s'] / base['step_s']:.3f}",
            f"{row['beside_compute']:.2f}",
            f"{row['gathered_bytes'] / 2**20:.0f}",
        ]
        for row in sorted(result["rows"], key=lambda row: (row["bucket_mib"], row["look_ahead"]))
    ]
    headers = ["look ahead", "bucket MiB", "step s", "/ as it stands", "transfers beside compute", "gathered MiB"]
    title = f"{result['model']} GPT, {WORLD} ranks, medians of {result['rounds']} steps; as it stands: "
    return (
        f"{title}look ahead {base['look_ahead']}, bucket {base['bucket_mib']} MiB\n\n{tabulate(rows, headers, tablefmt='github')}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names separated by commas")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    results = []
    for name in options.models.split(","):
        results.append(measure(name, options.rounds or ROUNDS[name]))
        print(report(results[-1]), end="\n\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
