"""Training with parameters, gradients and optimizer states on a drive, beside the same in memory and DeepSpeed's ZeRO-Infinity.

    python benchmarks/offload.py DIR                               # DIR: a folder on the drive; by default the current one
    python benchmarks/offload.py DIR --deepspeed-python PYTHON     # with DeepSpeed, see benchmarks/peers/README.md
    python benchmarks/offload.py DIR --forward                     # forwards only, parameters on the drive
    python benchmarks/offload.py DIR --offload optimizer           # only some of params, grads, optimizer on the drive
    python benchmarks/offload.py DIR --json offload.json           # keep the numbers
    python benchmarks/offload.py --docs offload.json               # measure nothing: write its tables in docs/ from kept numbers

A 354M GPT in fp32 with fused AdamW takes steps of 1,024 tokens on one process with all cores. All peers of a run are alive at
once and take steps in turn, so a noisy machine is noisy for all; what counts are the ratios of medians. A turn is two steps, of
which the second counts: what a step leaves to the next one is paid for there, and when the turn ends nothing is left. All must
arrive at the same loss. The limit is the larger of two times, as a perfect schedule would hide the other behind it: that of the
step's matrix products alone, and that of the bytes that must move, each at the speed measured in the same run.

At this size three peers need more than 24 GiB (10 GiB of it DeepSpeed's): there, take pairs.

    python benchmarks/offload.py DIR --peers "zinf inductor,zinf inductor nvme"
    python benchmarks/offload.py DIR --peers "zinf inductor nvme,deepspeed nvme" --deepspeed-python PYTHON
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _docs
import _limits
from _peers import Peer, all_cores, alternate, run, spawn, table_rows
from _worker import TakeStep, serve, stepping
from tabulate import tabulate

BASE, NVME, DEEPSPEED = "zinf inductor", "zinf inductor nvme", "deepspeed nvme"
OFFLOAD = ("params", "grads", "optimizer")
VOCABULARY, LENGTH, BATCH = 50257, 256, 4
TARGETS = {False: {(NVME, BASE): 1.35, (NVME, DEEPSPEED): 0.65}, True: {(NVME, BASE): 1.5}}
"""The largest ratio of two peers' steps that is good enough, by whether only forwards are taken."""

DEEPSPEED_WORKER = Path(__file__).parent / "peers" / "deepspeed_infinity.py"


def trainer(model: Any, settings: dict[str, Any]) -> TakeStep:
    """Return what takes a step of `model` with this package."""
    import torch  # noqa: PLC0415  (in the worker: the environment decides about threads and caches)

    options: dict[str, Any] = {"compute": "inductor"}
    if settings["offload"]:
        options |= dict.fromkeys(settings["offload"], "nvme") | {"nvme": settings["folder"]}
    call = torch.compile(model, backend="zero_infinity", options=options)

    def forward(tokens: Any, targets: Any) -> Any:
        with torch.no_grad():
            return call(tokens, targets)

    if settings["forward"]:
        return forward
    return stepping(call, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def work(settings: dict[str, Any], commands: Any) -> None:
    """Build the model and serve."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = settings["cache"]
    os.environ["OMP_WAIT_POLICY"] = "passive"  # peers that wait for their turn must not burn the others' cores
    import torch  # noqa: PLC0415

    from zinf_compile import synchronize  # noqa: PLC0415
    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    model = GPT(**settings["model"])
    torch.nn.init.normal_(model.wte.weight, std=0.02)  # torch's own, 1, would saturate the loss
    generator = torch.Generator().manual_seed(0)

    def draw() -> Any:
        return torch.randint(VOCABULARY, (2, settings["batch"], LENGTH), generator=generator)

    serve(commands, draw, lambda: trainer(model, settings), more={"rest": synchronize})


def start(name: str, settings: dict[str, Any], folder: str, deepspeed_python: str) -> Peer:
    """Start a peer, its files in `folder`, and take its first step."""
    own = settings | {"folder": folder, "cache": f"{folder}/{name.replace(' ', '-')}-cache", "threads": all_cores()}
    if name == DEEPSPEED:
        return Peer(name, [run(deepspeed_python, DEEPSPEED_WORKER, own)])
    return Peer(name, [spawn(work, own if name == NVME else own | {"offload": []})])


def measure(names: Sequence[str], settings: dict[str, Any], *, drive: str, rounds: int, deepspeed_python: str) -> dict[str, Any]:
    """Alternate the peers' steps, then measure what the machine can do; return the numbers."""
    with tempfile.TemporaryDirectory(dir=drive) as folder:
        rows = alternate([start(name, settings, folder, deepspeed_python) for name in names], rounds, second=True)
        parameters = _limits.count_parameters(settings["model"])
        limits = _limits.measure(folder, settings, parameters)
    return settings | {"parameters": parameters, "rounds": rounds, "limits": limits, "rows": rows}


def report(result: dict[str, Any]) -> str:
    """Return a title, the rows with their ratios to the first, the targets and the limits."""
    model = result["model"]
    what = "forwards" if result["forward"] else "steps"
    title = (
        f"{result['parameters'] / 1e6:.0f}M parameters ({model['layers']} layers of width {model['width']}), {result['batch']} x "
        f"{model['length']} tokens, on the drive: {', '.join(result['offload'])}; medians of {result['rounds']} {what}:"
    )
    rows = result["rows"]
    headers = ["peer", f"{what[:-1]} s", f"/ {rows[0]['peer']}", "CPU s", f"first {what[:-1]} s", "peak PSS GiB"]
    parts = [title, tabulate(table_rows(rows), headers, tablefmt="github"), targets(result), limits(result)]
    return "\n\n".join(part for part in parts if part)


def targets(result: dict[str, Any]) -> str:
    """Return a line for each target whose peers took part: what was found, and whether it is met."""
    seconds = {row["peer"]: row["step_s"] for row in result["rows"]}
    lines = []
    for (peer, other), most in TARGETS[result["forward"]].items():
        if peer in seconds and other in seconds:
            found = seconds[peer] / seconds[other]
            lines.append(f"- {peer} / {other}: {found:.2f}, target at most {most}: {'met' if found <= most else 'missed'}")
    return "\n".join(lines)


def limits(result: dict[str, Any]) -> str:
    """Return what no schedule can beat, and what it was computed from."""
    found, base = result["limits"], result["rows"][0]
    rates = {mode: rate / 1e9 for mode, rate in found["drive_bytes_per_s"].items()}
    bound = max(found["io_s"], found["compute_s"])
    slowest = "the drive" if found["io_s"] > found["compute_s"] else "compute"
    return (
        f"Limits, at the rates measured in this run: {found['compute_s']:.2f} s for the matrix products alone; "
        f"{found['io_s']:.2f} s for {found['read_bytes'] / 1e9:.2f} GB read and {found['written_bytes'] / 1e9:.2f} GB written by "
        f"{NVME} (the drive reads {rates['read']:.2f}, writes {rates['write']:.2f}, does both at {rates['both']:.2f} GB/s). The "
        f"bound is the larger, {slowest}'s: {bound:.2f} s, {bound / base['step_s']:.2f} x {base['peer']}."
    )


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the peers that take part; say which is left out."""
    names = options.peers.split(",") if options.peers else [BASE, NVME, DEEPSPEED]
    if unknown := set(names) - {BASE, NVME, DEEPSPEED}:
        raise SystemExit(f"no such peer: {', '.join(sorted(unknown))}; accepted: {BASE}, {NVME}, {DEEPSPEED}")
    if DEEPSPEED in names and not options.deepspeed_python:
        print(f"{DEEPSPEED} is left out: --deepspeed-python says where it is installed", file=sys.stderr)
        names.remove(DEEPSPEED)
    return names


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".", help="a folder on the drive")
    parser.add_argument("--forward", action="store_true", help="forwards only, without gradients")
    parser.add_argument("--offload", help="what lies on the drive, separated by commas; default: all, or params with --forward")
    parser.add_argument("--deepspeed-python", metavar="PYTHON", help="the interpreter that has DeepSpeed")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024, help="a multiple of 64, the size of a head")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"sequences of {LENGTH} tokens to a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", help="names separated by commas; the first is the base of the ratios")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.docs:
        _docs.write("benchmarks/offload.py", report, options.docs)
        return
    offload = options.offload.split(",") if options.offload else ["params"] if options.forward else list(OFFLOAD)
    if unknown := set(offload) - set(OFFLOAD):
        raise SystemExit(f"--offload doesn't know {', '.join(sorted(unknown))}; accepted: {', '.join(OFFLOAD)}")
    settings = {
        "model": {
            "layers": options.layers,
            "width": options.width,
            "heads": options.width // 64,
            "vocabulary": VOCABULARY,
            "length": LENGTH,
        },
        "batch": options.batch,
        "offload": offload,
        "forward": options.forward,
    }
    result = measure(
        chosen(options), settings, drive=options.folder, rounds=options.rounds, deepspeed_python=options.deepspeed_python
    )
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
