"""Planned beside measured: for each planner the bound, the simulated step and the steps that really ran.

    python benchmarks/plan.py DIR                         # GPTs, a mixture of experts and T5; states on DIR's drive
    python benchmarks/plan.py DIR --small                 # a small GPT only, in a few minutes
    python benchmarks/plan.py DIR --models gpt-124m --worlds 1 --places drive,2000 --planners one_ahead,cached_prefetch
    python benchmarks/plan.py DIR --json plan.json        # keep the numbers
    python benchmarks/plan.py --docs plan.json            # measure nothing: write the table in docs/ from kept numbers

Places: `drive`, parameters, gradients and states on DIR's drive; 500, 2000 and 7000, all in host memory beside a device that the
CPU plays, behind two links that move one byte in the time of so many floating-point operations. With "-auto" behind it, as in
`2000-auto`, the compiler decides what lives there, and what on the device. The device's memory is capped at a part of the
parameters. The first steps measure costs, and plans are made again from them; after that the planners take turns of two steps, of
which the second one is recorded with `zinf_compile.timeline`, and the median one stands here. Predicted is a step that repeats,
at the costs measured before; bound and simulated are at what regions, links and updates took in that very step, so that a machine
that changes does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _docs
from _links import write_profile
from _peers import Peer, matmul_rate, spawn
from tabulate import tabulate

LENGTH, VOCABULARY = 256, 50257
GPTS = {"gpt-small": (4, 256, 4), "gpt-124m": (12, 768, 12), "gpt-354m": (24, 1024, 16)}
MODELS = ("gpt-124m", "gpt-354m", "moe", "t5")
PLACES = ("drive", "500", "2000", "7000")
PLANNERS = ("just_in_time", "one_ahead", "largest_first", "greedy", "cached_prefetch")
DEFAULT = "cached_prefetch"
CAP = 0.75
"""Of the parameters' bytes: the cap of the device's memory, beside `BESIDE` and logits."""
BESIDE = 128 << 20
"""Bytes for a chunk of the optimizer's step, and for gradients on their way."""
LOGITS = 4
"""Tensors as large as the logits that compute holds at a time, for which the cap has room, too."""
DECIDED = "-auto"
"""Behind a place: homes are the compiler's decision, by a profile of the links where they are simulated."""
LOW, HIGH = 0.90, 1.10
"""Measured / simulated, as it should be."""


def build(name: str) -> Any:
    """Return a model whose call takes (tokens, targets) and returns the loss."""
    import torch  # noqa: PLC0415  (in the worker: the environment decides about threads)
    from torch import nn  # noqa: PLC0415

    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    if name in GPTS:
        layers, width, heads = GPTS[name]
        vocabulary = 2048 if name == "gpt-small" else VOCABULARY
        model: nn.Module = GPT(layers=layers, width=width, heads=heads, vocabulary=vocabulary, length=LENGTH)
        torch.nn.init.normal_(model.wte.weight, std=0.02)  # type: ignore[union-attr,arg-type]
        return model
    if name == "moe":
        return _with_experts(GPT(layers=6, width=512, heads=8, vocabulary=8192, length=LENGTH))
    import transformers  # noqa: PLC0415

    class T5(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.T5ForConditionalGeneration(
                transformers.T5Config(dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
            )

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
            return self.model(input_ids=tokens, labels=targets).loss

    return T5()


def _with_experts(model: Any) -> Any:
    """Give each block of a GPT four experts, of which a token is sent through two."""
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    class Experts(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gate = nn.Linear(width, 4)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.gate(x).softmax(-1)
            kept = scores >= scores.topk(2, -1).values[..., -1:]
            return sum((scores * kept)[..., n : n + 1] * expert(x) for n, expert in enumerate(self.experts))  # type: ignore[return-value]

    for block in model.h:
        block.up, block.down = Experts(block.up.in_features), nn.Identity()
    return model


class Case(NamedTuple):
    """What is trained, and where it lives."""

    model: str
    world: int
    place: str
    folder: str
    flops: float
    """Floating-point operations per second of one rank."""
    compute: str

    @property
    def on_drive(self) -> bool:
        """Whether there is a drive; else a device behind two links."""
        return self.place.removesuffix(DECIDED) == "drive"

    @property
    def link_rate(self) -> float:
        """Bytes per second of each simulated link."""
        return self.flops / float(self.place.removesuffix(DECIDED))


def work(case: Case, planner: str, rank: int, pipe: Any) -> None:
    """Train under a planner, a command at a time: "step", "record" two steps of which the second counts, "rest", "summary"."""
    world = case.world
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    import zinf_compile  # noqa: PLC0415
    from zinf_compile.errors import ZinfError  # noqa: PLC0415
    from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating  # noqa: PLC0415

    torch.set_num_threads(threads_of(world))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{case.folder}/{planner}", rank=rank, world_size=world)
    simulated: Any = contextlib.nullcontext()
    if not case.on_drive:
        simulated = simulating(SimulatedDevice(bytes_per_s=case.link_rate))
    with simulated:
        model, step, cap = _training(case, planner, rank)
        recordings, refusal = [], ""
        while (command := pipe.recv()) != "end":
            answer: Any = None
            try:
                if command == "step":
                    start, loss = time.perf_counter(), math.nan if refusal else step()
                    answer = time.perf_counter() - start, 0.0, loss
                elif command == "record" and not refusal:
                    step()
                    recordings.append(zinf_compile.timeline(model))
                    step()
                elif command == "rest" and not refusal:
                    zinf_compile.synchronize()
                elif command == "summary":
                    answer = {"error": refusal} if refusal else {"cap": cap, **_summary(recordings)}
            except ZinfError as error:
                refusal, answer = str(error), (math.nan, 0.0, math.nan)
            pipe.send(answer)
    pipe.send(None)
    if world > 1:
        dist.destroy_process_group()


def threads_of(world: int) -> int:
    """Return the threads of each rank."""
    return max(1, (os.cpu_count() or 1) // world)


def measure_flops(threads: int, pipe: Any) -> None:
    """Send the rate of one large matrix product."""
    pipe.send(matmul_rate(threads))


def _training(case: Case, planner: str, rank: int) -> tuple[Any, Callable[[], float], int]:
    """Return a model, what takes a step with it and returns the loss, and the cap of the device's memory."""
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    model = build(case.model)
    vocabulary = 2048 if case.model == "gpt-small" else 8192
    words = max(module.num_embeddings for module in model.modules() if isinstance(module, torch.nn.Embedding))
    cap = int(CAP * sum(p.nbytes for p in model.parameters())) + BESIDE + LOGITS * 4 * 2 * LENGTH * words
    options: dict[str, Any] = {"planner": planner, "device_memory": cap, "compute": case.compute}
    options["bucket"] = "1MiB" if case.model == "gpt-small" else "32MiB"
    if not case.place.endswith(DECIDED):
        options |= dict.fromkeys(("params", "grads", "optimizer"), "nvme" if case.on_drive else "host")
    elif not case.on_drive:
        path = Path(case.folder) / f"{planner}-{rank}.json"
        options["machine"] = write_profile(path, flops=case.flops, rate=case.link_rate, memory=cap)
    if case.on_drive:
        options["nvme"] = case.folder
    call = torch.compile(model, backend="zero_infinity", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(rank)

    def step() -> float:
        tokens, targets = torch.randint(vocabulary, (2, 2, LENGTH), generator=generator)
        loss = call(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return model, step, cap


def _summary(recordings: Sequence[Any]) -> dict[str, Any]:
    """Return the numbers of the median step."""
    from zinf_compile.plan.compared_page import lane_rows  # noqa: PLC0415
    from zinf_compile.plan.lower_bound import lower_bound  # noqa: PLC0415

    order = sorted(recordings, key=lambda each: each.measured.seconds)
    middle = order[len(order) // 2]
    before, planned = middle.planned, middle.at_own_costs()
    if planned is None:
        return {"error": middle.note}
    rows = lane_rows(middle.measured, planned.timeline)
    waited = math.fsum(row.exposed for row in rows)
    return {
        "measured": middle.measured.seconds,
        "all_measured": [each.measured.seconds for each in recordings],
        "simulated": planned.timeline.seconds,
        "simulated_before": before.timeline.seconds,
        "bound": lower_bound(planned.problem).seconds,
        "waited": waited,
        "lanes": {
            row.lane: {
                "busy": row.busy,
                "planned_busy": row.planned_busy,
                "exposed": row.exposed,
                "planned_exposed": row.planned_exposed,
            }
            for row in rows
        },
    }


def run_case(case: Case, planners: Sequence[str], rounds: int) -> dict[str, Any]:
    """Return a row for each planner, whose steps are taken in turn; of several ranks the slowest one's."""
    from zinf_compile.backend.replan import FIRST, MEASURED  # noqa: PLC0415

    with tempfile.TemporaryDirectory(dir=case.folder) as own:
        rate = spawn(measure_flops, threads_of(case.world))
        case = case._replace(folder=own, flops=rate.pipe.recv())
        rate.join(20)
        peers = []
        for planner in planners:
            peers.append(Peer(planner, [spawn(work, case, planner, rank) for rank in range(case.world)]))
            for _ in range(FIRST + MEASURED):
                peers[-1].step()
            peers[-1].ask("rest")
        for _ in range(rounds):
            for peer in peers:
                peer.ask("record")
                peer.ask("rest")
        rows = []
        for peer in peers:
            found = [{"planner": peer.name, **row} for row in peer.ask("summary")]
            rows.append(max(found, key=lambda row: row.get("measured", math.inf)))
            print(json.dumps(case._asdict() | {k: v for k, v in rows[-1].items() if k != "lanes"}), flush=True)
            peer.end()
    losses = {tuple(peer.losses) for peer in peers if not any(map(math.isnan, peer.losses))}
    kept = {"model": case.model, "world": case.world, "place": case.place, "flops": case.flops}
    return {**kept, "same_losses": len(losses) <= 1, "rows": rows}


def lost_on(row: dict[str, Any]) -> str:
    """Return the lane on which a step lost, or won, most against its simulation, with the seconds."""
    lanes = row["lanes"]
    lost = {lane: each["exposed"] - (each["planned_exposed"] or 0.0) for lane, each in lanes.items()}
    updating = lanes.get("update", {"busy": 0.0, "planned_busy": 0.0})
    lost["update"] = updating["busy"] - (updating["planned_busy"] or 0.0)
    rest = row["measured"] - row["waited"] - updating["busy"]  # with what the host does between regions and graphs
    lost["compute"] = rest - (lanes["compute"]["planned_busy"] or 0.0)
    lane = max(lost, key=lambda name: abs(lost[name]))
    return f"{lane} {lost[lane]:+.2f} s"


def report(result: dict[str, Any]) -> str:
    """Return the rows as a table."""
    rows = []
    for case in result["cases"]:
        default = next((row["measured"] for row in case["rows"] if row["planner"] == DEFAULT and "error" not in row), math.nan)
        for row in case["rows"]:
            where = [case["model"], case["world"], case["place"], row["planner"]]
            if "error" in row:
                rows.append([*where, "", "", "", "", "", "", "", row["error"].splitlines()[0][:80]])
                continue
            ratio = row["measured"] / row["simulated"]
            missed = "" if LOW <= ratio <= HIGH else lost_on(row)
            rows.append(
                [
                    *where,
                    *(f"{row[key]:.2f}" for key in ("bound", "simulated_before", "simulated", "measured")),
                    f"{row['measured'] / default:.2f}",
                    f"{ratio:.2f}",
                    f"{row['measured'] / row['bound']:.2f}",
                    missed,
                ]
            )
    headers = ["model", "ranks", "place", "planner", "bound s", "predicted s", "simulated s", "measured s"]
    headers += ["/ default's", "measured / simulated"]
    table = tabulate(rows, [*headers, "measured / bound", "most lost, where outside 0.90 to 1.10"], tablefmt="github")
    ratios = [row["measured"] / row["simulated"] for case in result["cases"] for row in case["rows"] if "error" not in row]
    inside = sum(LOW <= ratio <= HIGH for ratio in ratios)
    middle = f"median {statistics.median(ratios):.2f}" if ratios else "nothing was measured"
    same = sum(case["same_losses"] for case in result["cases"])
    return (
        f"{table}\n\nMeasured / simulated: {middle}, within 0.90 to 1.10 in {inside} of {len(ratios)}. "
        f"All planners of a case had the same losses, bit for bit: in {same} of {len(result['cases'])}."
    )


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="on the drive")
    parser.add_argument("--small", action="store_true", help="a small GPT on one rank, on the drive and at 2,000")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--worlds", default="1,2")
    parser.add_argument("--places", default=",".join(PLACES))
    parser.add_argument("--planners", default=",".join(PLANNERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compute", choices=("inductor", "fx"), default="inductor")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.docs:
        _docs.write("benchmarks/plan.py", report, options.docs)
        return
    if options.folder is None:
        parser.error("a folder on the drive is needed")
    models = ["gpt-small"] if options.small else options.models.split(",")
    worlds = [1] if options.small else [int(world) for world in options.worlds.split(",")]
    places = ["drive", "2000"] if options.small else options.places.split(",")
    result: dict[str, Any] = {"rounds": options.rounds, "cap": CAP, "cases": []}
    for model in models:
        for world in worlds:
            for place in places:
                case = Case(model, world, place, options.folder, math.nan, options.compute)
                result["cases"].append(run_case(case, options.planners.split(","), options.rounds))
                if options.json:
                    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


if __name__ == "__main__":
    sys.exit(main())
