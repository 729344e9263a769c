"""A training step on one GPU beside eager PyTorch, Inductor and FSDP2: all on the GPU, states in host memory, or by a plan.

    python benchmarks/gpu.py                       # a 355M GPT on the GPU: eager, Inductor, this backend
    python benchmarks/gpu.py --offload             # its states in host memory: FSDP2's CPU offload, this backend
    python benchmarks/gpu.py --within 12GiB        # where the plan puts them within that: FSDP2's CPU offload, this backend
    python benchmarks/gpu.py --nvme DIR            # its states on DIR's drive, beside host memory
    python benchmarks/gpu.py --large               # a GPT whose states are larger than the GPU's memory
    python benchmarks/gpu.py --json gpu.json       # keep the numbers
    python benchmarks/gpu.py --docs gpu.json       # measure nothing: write its tables in docs/ from kept numbers

In bfloat16 by autocast, parameters and states in fp32, with fused AdamW; states in host memory are updated there. All peers of a
run are alive at once and take steps in turn; what counts are the ratios of medians to the first peer. All must arrive at the same
loss, within what bfloat16 rounds. A turn is two steps, of which the second counts, and what that leaves to be done is waited for.
The limits are the times of the step's products alone and of the bytes that this backend moved between host and GPU,
each at the speed measured in the same run.
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
from _limits import count_parameters
from _peers import Peer, alternate, best_of, spawn
from _worker import TakeStep, serve, stepping
from tabulate import tabulate

VOCABULARY, LENGTH = 50257, 1024
ON_GPU = ("inductor", "eager", "zinf")
OFFLOADED = ("fsdp2 offload", "zinf host")
PLANNED = ("fsdp2 offload", "zinf")
DRIVE = ("zinf host", "zinf nvme")
STATES = ("params", "grads", "optimizer")


def trainer(peer: str, model: Any, settings: dict[str, Any]) -> TakeStep:
    """Return what takes a step of `model` the way of `peer`."""
    import torch  # noqa: PLC0415  (in the worker: the environment decides about caches)

    call = model
    if peer == "inductor":
        call = torch.compile(model)
    elif peer.startswith("fsdp2"):
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard  # noqa: PLC0415

        model.h = torch.nn.ModuleList([torch.compile(block, fullgraph=True) for block in model.h])  # as torchtitan does
        for block in model.h:
            fully_shard(block, offload_policy=CPUOffloadPolicy())
        fully_shard(model, offload_policy=CPUOffloadPolicy())
    elif peer.startswith("zinf"):
        call = torch.compile(model, backend="zero_infinity", options=settings["options"] | options_of(peer, settings))

    def forward(tokens: Any, targets: Any) -> Any:
        with torch.autocast(settings["device"], dtype=torch.bfloat16):
            return call(tokens, targets)

    return stepping(forward, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def options_of(peer: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the options that say where this peer's states live."""
    tier = {"zinf host": "host", "zinf nvme": "nvme"}.get(peer)
    if tier is None:
        return {}
    return dict.fromkeys(STATES, tier) | ({"nvme": settings["folder"]} if tier == "nvme" else {})


def work(peer: str, settings: dict[str, Any], rendezvous: str, commands: Any) -> None:
    """Build the model and serve; "account" asks for the peak of the GPU's memory and for the bytes of a step over each link."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{rendezvous}-cache"
    import torch  # noqa: PLC0415

    import zinf_compile  # noqa: PLC0415
    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    device = torch.device(settings["device"])
    if peer.startswith("fsdp2"):
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{rendezvous}", rank=0, world_size=1)
    torch.manual_seed(0)
    if settings["on_meta"]:
        with torch.device("meta"):
            model = GPT(**settings["model"])
        zinf_compile.partition(model, device=device, **options_of(peer, settings))
    else:
        with device:
            model = GPT(**settings["model"])
            torch.nn.init.normal_(model.wte.weight, std=0.02)  # torch's own, 1, would saturate the loss
    generator = torch.Generator().manual_seed(0)

    def draw() -> Any:
        return torch.randint(VOCABULARY, (2, settings["batch"], LENGTH), generator=generator).to(device)

    def rest() -> None:
        zinf_compile.synchronize()
        settle(device)

    def account() -> dict[str, Any]:
        links = zinf_compile.stats(model)["links"] if peer.startswith("zinf") else {}
        return {
            "peak_gpu_bytes": torch.accelerator.max_memory_allocated(device) if device.type != "cpu" else 0,
            "link_bytes": {name: link["bytes_last_step"] for name, link in links.items()},
        }

    serve(commands, draw, lambda: trainer(peer, model, settings), more={"rest": rest, "account": account})
    if peer.startswith("fsdp2"):
        torch.distributed.destroy_process_group()


def measure(names: Sequence[str], settings: dict[str, Any], *, drive: str | None, rounds: int) -> dict[str, Any]:
    """Alternate the peers' steps, then measure what the machine can do; return the numbers."""
    with tempfile.TemporaryDirectory(dir=drive) as folder:
        own = settings | {"folder": folder}
        ranks = [spawn(work, name, own, f"{folder}/{name.replace(' ', '-')}") for name in names]
        peers = [Peer(name, [rank]) for name, rank in zip(names, ranks, strict=True)]
        rows = alternate(peers, rounds, second=True, account=True, near=2**-8)
    return settings | {"rounds": rounds, "rows": rows, **limits(settings)}


def limits(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the device's name, the model's parameters, and the speeds of products and of copies to and from the device."""
    import torch  # noqa: PLC0415

    device = torch.device(settings["device"])
    a, b = (torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) for _ in range(2))
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=device.type != "cpu")
    there = torch.empty_like(host, device=device)

    def seconds(run: Callable[[], object]) -> float:
        return best_of(run, lambda: settle(device))

    return {
        "name": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "parameters": count_parameters(settings["model"]),
        "flops_per_s": 2 * 4096**3 / seconds(lambda: a @ b),
        "bytes_per_s": {
            "host to device": host.nbytes / seconds(lambda: there.copy_(host, non_blocking=True)),
            "device to host": host.nbytes / seconds(lambda: host.copy_(there, non_blocking=True)),
        },
    }


def settle(device: Any) -> None:
    """Return when nothing runs on the device any more."""
    import torch  # noqa: PLC0415

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def report(result: dict[str, Any]) -> str:
    """Return a title, the rows with their ratios to the first, and the limits."""
    rows, base = result["rows"], result["rows"][0]["step_s"]
    tokens = result["batch"] * LENGTH
    model = result["model"]
    title = (
        f"{result['parameters'] / 1e6:,.0f}M parameters ({model['layers']} layers of width {model['width']}), "
        f"{result['batch']} x {LENGTH} tokens, {result['name']}, medians of {result['rounds']} steps:"
    )
    cells = [
        [
            row["peer"],
            f"{row['step_s'] * 1e3:.0f}",
            f"{row['step_s'] / base:.2f}",
            f"{tokens / row['step_s']:,.0f}",
            f"{row['account']['peak_gpu_bytes'] / 2**30:.2f}",
            f"{row['peak_pss_gib']:.1f}",
            f"{row['first_step_s']:.0f}",
        ]
        for row in rows
    ]
    headers = ["peer", "step ms", f"/ {rows[0]['peer']}", "tokens/s", "peak GPU GiB", "host GiB", "first step s"]
    return f"{title}\n\n{tabulate(cells, headers, tablefmt='github')}\n\n{limits_text(result)}"


def limits_text(result: dict[str, Any]) -> str:
    """Return the times that no schedule can beat, and the speeds that they were computed from."""
    compute = 6 * result["parameters"] * result["batch"] * LENGTH / result["flops_per_s"]
    said = [f"{compute * 1e3:.0f} ms for the matrix products at {result['flops_per_s'] / 1e12:.0f} TFLOP/s"]
    for row in result["rows"]:
        for link, rate in result["bytes_per_s"].items():
            if moved := row["account"]["link_bytes"].get(link):
                said.append(
                    f"{moved / rate * 1e3:.0f} ms for {moved / 1e9:.2f} GB from {link} by {row['peer']} at {rate / 1e9:.0f} GB/s"
                )
    states = 16 * result["parameters"] / 2**30
    cap = result["options"].get("device_memory")
    within = f"zinf within {cap} of the GPU. " if cap else ""
    return f"{within}Parameters, gradients and states are {states:.1f} GiB. Limits: {'; '.join(said)}."


def peers_of(options: argparse.Namespace) -> Sequence[str]:
    """Return the peers' names, the base of the ratios first."""
    if options.peers:
        return str(options.peers).split(",")
    if options.within:
        return PLANNED
    if options.nvme:
        return DRIVE
    if options.offload:
        return OFFLOADED
    return DRIVE[:1] if options.large else ON_GPU


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offload", action="store_true", help="states in host memory")
    parser.add_argument("--within", metavar="BYTES", help="states where the plan puts them, within this much device memory")
    parser.add_argument("--nvme", metavar="DIR", help="states on this folder's drive, beside host memory")
    parser.add_argument("--large", action="store_true", help="48 layers of width 3072, states in host memory, made there")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="a multiple of 64, the size of a head")
    parser.add_argument("--batch", type=int, default=8, help=f"sequences of {LENGTH} tokens to a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", help="names separated by commas; the first is the base of the ratios")
    parser.add_argument("--options", type=json.loads, default={}, help="more options of this backend, as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.within and (options.nvme or options.large):
        parser.error("--within goes with neither --nvme nor --large")
    if options.docs:
        _docs.write("benchmarks/gpu.py", report, options.docs)
        return
    import torch  # noqa: PLC0415

    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py measures nothing: no GPU here", file=sys.stderr)
        return
    planned = dict.fromkeys(STATES, "auto") | {"device_memory": options.within} if options.within else {}
    width = options.width or (3072 if options.large else 1024)
    settings = {
        "model": {
            "layers": options.layers or (48 if options.large else 24),
            "width": width,
            "heads": width // 64,
            "vocabulary": VOCABULARY,
            "length": LENGTH,
        },
        "batch": options.batch,
        "on_meta": options.large,
        "device": options.device,
        "options": planned | options.options,
    }
    result = measure(peers_of(options), settings, drive=options.nvme, rounds=options.rounds)
    print(report(result), flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
