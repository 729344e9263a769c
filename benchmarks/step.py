"""One training step of a 124M GPT beside its peers: wall time, CPU time, time to the first step, memory per rank.

    python benchmarks/step.py                      # one process: eager, Inductor, this backend
    python benchmarks/step.py --world 2            # two gloo ranks of one thread: DDP, FSDP2, DeepSpeed, this backend
    python benchmarks/step.py --world 2 --peers "ddp,zinf inductor,zinf inductor zero2"    # parameters gathered once a step
    TMPDIR=DIR python benchmarks/step.py --peers "zinf inductor,zinf inductor nvme"    # optimizer states on DIR's drive
    python benchmarks/step.py --cold --layers 48   # the time to the first step only, each peer alone with an empty cache
    python benchmarks/step.py --cold --layers 24 --peers "zinf fx,zinf fx auto"    # beside one for which homes are decided
    python benchmarks/step.py --json step.json     # keep the numbers
    python benchmarks/step.py --docs step.json     # measure nothing: write its tables in docs/ from kept numbers

All peers of a run are alive at once and take steps in turn, so a noisy machine is noisy for all; what counts are the ratios of
medians to the first peer. All must arrive at the same loss. The floor is the time of the step's matrix products alone, at the
speed measured in the same run.

DeepSpeed takes part where it is installed; a build without CUDA is enough:

    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _docs
from _peers import Peer, alternate, check_losses, matmul_rate, spawn, table_rows
from _worker import TakeStep, serve, stepping
from tabulate import tabulate

LENGTH, BATCH, VOCABULARY = 256, 2, 50257
PEERS: dict[int, tuple[str, ...]] = {
    1: ("inductor", "eager", "zinf fx", "zinf inductor"),
    2: ("ddp", "fsdp2", "fsdp2 compiled", "deepspeed", "zinf fx", "zinf inductor"),
}


def trainer(peer: str, model: Any) -> TakeStep:
    """Return what takes a step of `model` the way of `peer`."""
    import torch  # noqa: PLC0415  (in the worker: the environment decides about threads and caches)

    def adamw() -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    if peer == "deepspeed":
        return _deepspeed_trainer(model, adamw())
    call = model
    if peer == "inductor":
        call = torch.compile(model)
    elif peer == "ddp":
        call = torch.nn.parallel.DistributedDataParallel(model)
    elif peer.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        if peer == "fsdp2 compiled":  # as torchtitan does: each block by itself, before it is sharded
            model.h = torch.nn.ModuleList([torch.compile(block, fullgraph=True) for block in model.h])
        for block in model.h:
            fully_shard(block)
        fully_shard(model)
    elif peer.startswith("zinf "):
        options: dict[str, Any] = {"compute": peer.split()[1]}
        if peer.endswith(" nvme"):
            options |= {"optimizer": "nvme", "nvme": tempfile.gettempdir()}
        if peer.endswith(" zero2"):
            options |= {"reshard_after_forward": False}
        if peer.endswith(" auto"):  # homes of all states are chosen within as much memory as two copies of the parameters take
            room = 2 * sum(parameter.nbytes for parameter in model.parameters())
            options |= {"device_memory": room, "nvme": tempfile.gettempdir()}
        call = torch.compile(model, backend="zero_infinity", options=options)
    return stepping(call, adamw())  # made last: fully_shard replaces the parameters


def _deepspeed_trainer(model: Any, optimizer: Any) -> TakeStep:
    import deepspeed  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_initialized():
        raise SystemExit("DeepSpeed needs several ranks: --world 2")
    warnings.simplefilter("ignore", FutureWarning)  # of the collectives that it calls, by their older names
    config = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def take(tokens: Any, targets: Any) -> Any:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return take


def work(peer: str, rank: int, world: int, layers: int, rendezvous: str, commands: Any) -> None:
    """Build the model and serve; "compiling" asks for the seconds spent with it, None where the peer doesn't say."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )  # as torchrun does
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{rendezvous}-cache"
    os.environ["OMP_WAIT_POLICY"] = "passive"  # peers that wait for their turn must not burn the others' cores
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from zinf_compile.cli.models import GPT  # noqa: PLC0415

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = GPT(layers=layers, width=768, heads=12, vocabulary=VOCABULARY, length=LENGTH)
    torch.nn.init.normal_(model.wte.weight, std=0.02)  # torch's own, 1, would saturate the loss
    generator = torch.Generator().manual_seed(rank)

    def draw() -> Any:
        return torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)

    serve(commands, draw, lambda: trainer(peer, model), more={"compiling": _seconds_compiling})
    if world > 1:
        dist.destroy_process_group()


def start(name: str, world: int, layers: int, folder: str) -> Peer:
    """Start the ranks of a peer and take its first step."""
    rendezvous = f"{folder}/{name.replace(' ', '-')}"
    return Peer(name, [spawn(work, name, rank, world, layers, rendezvous) for rank in range(world)])


def measure(names: Sequence[str], *, world: int, layers: int, rounds: int) -> dict[str, Any]:
    """Alternate the peers' steps; return the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        rows = alternate([start(name, world, layers, folder) for name in names], rounds)
    return {"world": world, "layers": layers, "rounds": rounds, "floor_s": floor_s(layers, world), "rows": rows}


def measure_cold(names: Sequence[str], *, world: int, layers: int, rounds: int) -> dict[str, Any]:
    """Take each peer's first step, alone and with an empty cache, again and again in turn; return the numbers."""
    firsts: dict[str, list[float]] = {name: [] for name in names}
    compiling: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                peer = start(name, world, layers, folder)
                firsts[name].append(peer.first_s)
                losses[name] = peer.losses
                if said := [seconds for seconds in peer.ask("compiling") if seconds is not None]:
                    compiling[name].append(max(said))
                peer.end()
    rows = [
        {
            "peer": name,
            "first_step_s": statistics.median(firsts[name]),
            "compiling_s": statistics.median(compiling[name]) if compiling[name] else None,
            "first_steps_s": firsts[name],
            "losses": losses[name],
        }
        for name in names
    ]
    check_losses(rows)
    return {"cold": True, "world": world, "layers": layers, "rounds": rounds, "rows": rows}


def floor_s(layers: int, world: int) -> float:
    """Return the time of the step's matrix products alone, at the rate of one large product measured here and now."""
    matrix_elements = layers * 12 * 768**2 + 50257 * 768
    return 6 * matrix_elements * BATCH * LENGTH / matmul_rate(max(1, (os.cpu_count() or 1) // world))


def report(result: dict[str, Any]) -> str:
    """Return a title, the rows with their ratios to the first, and the floor."""
    title = f"{result['layers']} layers, {result['world']} rank(s), {BATCH} x {LENGTH} tokens per rank"
    if result.get("cold"):
        return f"{title}, first step with empty caches, medians of {result['rounds']}:\n\n{cold_table(result)}"
    floor = f"Floor (the matrix products alone, at the rate measured in this run): {result['floor_s']:.2f} s."
    return f"{title}, medians of {result['rounds']} steps:\n\n{table(result)}\n\n{floor}"


def table(result: dict[str, Any]) -> str:
    """Return the rows as text, each with its ratio to the first."""
    headers = ["peer", "step s", f"/ {result['rows'][0]['peer']}", "CPU s, all ranks", "first step s", "peak PSS GiB per rank"]
    return tabulate(table_rows(result["rows"]), headers, tablefmt="github")


def cold_table(result: dict[str, Any]) -> str:
    """Return the rows of a cold run as text, each with its ratio to the first."""
    base = result["rows"][0]
    rows = [
        [
            row["peer"],
            f"{row['first_step_s']:.1f}",
            f"{row['first_step_s'] / base['first_step_s']:.2f}",
            "" if row["compiling_s"] is None else f"{row['compiling_s']:.1f}",
        ]
        for row in result["rows"]
    ]
    return tabulate(rows, ["peer", "first step s", f"/ {base['peer']}", "of it compiling regions s"], tablefmt="github")


def _seconds_compiling() -> float | None:
    """Return the wall seconds in which this backend was compiling regions; None for the other peers."""
    inductor = sys.modules.get("zinf_compile.backend.regions")
    seconds: Callable[[], float] | None = getattr(inductor, "seconds_compiling", None)
    return seconds() if seconds is not None else None


def installed(names: Sequence[str]) -> list[str]:
    """Return the peers that can run here; say which are left out."""
    if "deepspeed" in names and importlib.util.find_spec("deepspeed") is None:
        print("deepspeed is left out: it is not installed", file=sys.stderr)
        return [name for name in names if name != "deepspeed"]
    return list(names)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, choices=sorted(PEERS), default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, help="default: 7; 3 with --cold")
    parser.add_argument("--cold", action="store_true", help="the first step only, each peer alone with an empty cache")
    parser.add_argument("--peers", help="names separated by commas; the first is the base of the ratios")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.docs:
        _docs.write("benchmarks/step.py", report, options.docs)
        return
    names = installed(options.peers.split(",") if options.peers else PEERS[options.world])
    run, rounds = (measure_cold, 3) if options.cold else (measure, 7)
    result = run(names, world=options.world, layers=options.layers, rounds=options.rounds or rounds)
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
