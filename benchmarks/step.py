"""One training step of a 124M GPT beside its peers: wall time, CPU time, time to the first step, memory per rank.

    python benchmarks/step.py                      # one process: eager, Inductor, this backend
    python benchmarks/step.py --world 2            # two gloo ranks of one thread: DDP, FSDP2, DeepSpeed, this backend
    TMPDIR=DIR python benchmarks/step.py --peers "zinf inductor,zinf inductor nvme"    # optimizer states on DIR's drive
    python benchmarks/step.py --cold --layers 48   # the time to the first step only, each peer alone with an empty cache
    python benchmarks/step.py --json step.json     # keep the numbers
    python benchmarks/step.py --readme step.json   # measure nothing: write the README's tables from kept numbers

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
import math
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _readme
from tabulate import tabulate

LENGTH, BATCH, VOCABULARY = 256, 2, 50257
PEERS: dict[int, tuple[str, ...]] = {
    1: ("inductor", "eager", "zinf fx", "zinf inductor"),
    2: ("ddp", "fsdp2", "fsdp2 compiled", "deepspeed", "zinf fx", "zinf inductor"),
}
STEPS_FOR_MEMORY = 2
"""Taken by each peer after the timed ones; the most memory held during them is reported."""

TakeStep = Callable[[Any, Any], Any]
"""`take(tokens, targets)` makes one training step and returns its loss."""


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
        call = torch.compile(model, backend="zero_infinity", options=options)
    optimizer = adamw()  # made last: fully_shard replaces the parameters

    def take(tokens: Any, targets: Any) -> Any:
        loss = call(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return take


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
    """Serve commands: "step" is answered with (wall s, CPU s, loss), the others with one number."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )  # as torchrun does
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{rendezvous}-cache"
    os.environ["OMP_WAIT_POLICY"] = "passive"  # peers that wait for their turn must not burn the others' cores
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from zinf_compile.targets import GPT  # noqa: PLC0415

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = GPT(layers=layers, width=768, heads=12, vocabulary=VOCABULARY, length=LENGTH)
    torch.nn.init.normal_(model.wte.weight, std=0.02)  # torch's own, 1, would saturate the loss
    generator = torch.Generator().manual_seed(rank)
    take: TakeStep | None = None
    while (command := commands.recv()) != "end":
        if command == "step":
            tokens, targets = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
            wall, cpu = time.perf_counter(), time.process_time()
            take = take or trainer(peer, model)  # the first step's time includes wrapping the model
            loss = take(tokens, targets)
            commands.send((time.perf_counter() - wall, time.process_time() - cpu, loss.item()))
        elif command == "forget peak":
            Path("/proc/self/clear_refs").write_text("5")
            commands.send(0)
        elif command == "peak":
            commands.send(_peak_pss_gib())
        elif command == "compiling":
            commands.send(_seconds_compiling())
    commands.send("ended")
    if world > 1:
        dist.destroy_process_group()


class Peer:
    """The ranks of one way to train, alive and waiting."""

    def __init__(self, name: str, world: int, layers: int, folder: str) -> None:
        self.name = name
        context = mp.get_context("spawn")
        rendezvous = f"{folder}/{name.replace(' ', '-')}"
        pairs = [context.Pipe() for _ in range(world)]
        self._pipes = [ours for ours, _ in pairs]
        self._workers = [
            context.Process(target=work, args=(name, rank, world, layers, rendezvous, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for worker in self._workers:
            worker.start()
        for _, theirs in pairs:
            theirs.close()  # so that a rank that dies is noticed
        self.losses: list[float] = []
        self.first_s = self.step()[0]
        self.steps: list[tuple[float, float]] = []

    def step(self) -> tuple[float, float]:
        """Take one step on all ranks; return the slowest rank's wall seconds and all ranks' CPU seconds."""
        walls, cpus, losses = zip(*self._ask("step"), strict=True)
        self.losses.append(statistics.mean(losses))
        return max(walls), sum(cpus)

    def peak_pss_gib(self) -> float:
        """Take a few steps; return the most memory that a rank held during them."""
        self._ask("forget peak")
        for _ in range(STEPS_FOR_MEMORY):
            self.step()
        return max(self._ask("peak"))

    def seconds_compiling(self) -> float | None:
        """Return how long the slowest rank was compiling regions; None where the peer doesn't say."""
        return max((s for s in self._ask("compiling") if s is not None), default=None)

    def end(self) -> None:
        """Stop all ranks."""
        self._ask("end")
        for worker in self._workers:
            worker.join(timeout=10)

    def _ask(self, command: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(command)
        try:
            return [pipe.recv() for pipe in self._pipes]
        except EOFError:
            raise SystemExit(f"{self.name}: a rank ended early; what it said is above") from None


def measure(names: Sequence[str], *, world: int, layers: int, rounds: int) -> dict[str, Any]:
    """Alternate the peers' steps; return the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        peers = [Peer(name, world, layers, folder) for name in names]
        for _ in range(rounds):
            for peer in peers:
                peer.steps.append(peer.step())
        rows = [
            {
                "peer": peer.name,
                "step_s": statistics.median(wall for wall, _ in peer.steps),
                "cpu_s": statistics.median(cpu for _, cpu in peer.steps),
                "first_step_s": peer.first_s,
                "peak_pss_gib": peer.peak_pss_gib(),
                "steps_s": [wall for wall, _ in peer.steps],
                "losses": peer.losses,
            }
            for peer in peers
        ]
        for peer in peers:
            peer.end()
    _check_losses(rows)
    return {"world": world, "layers": layers, "rounds": rounds, "floor_s": floor_s(layers, world), "rows": rows}


def measure_cold(names: Sequence[str], *, world: int, layers: int, rounds: int) -> dict[str, Any]:
    """Take each peer's first step, alone and with an empty cache, again and again in turn; return the numbers."""
    firsts: dict[str, list[float]] = {name: [] for name in names}
    compiling: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                peer = Peer(name, world, layers, folder)
                firsts[name].append(peer.first_s)
                losses[name] = peer.losses
                if (seconds := peer.seconds_compiling()) is not None:
                    compiling[name].append(seconds)
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
    _check_losses(rows)
    return {"cold": True, "world": world, "layers": layers, "rounds": rounds, "rows": rows}


def _check_losses(rows: Sequence[dict[str, Any]]) -> None:
    expected = rows[0]["losses"]
    for row in rows:
        if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(row["losses"], expected, strict=True)):
            raise SystemExit(f"{row['peer']} trained something else: losses {row['losses']}; {rows[0]['peer']} had {expected}")


def floor_s(layers: int, world: int) -> float:
    """Return the time of the step's matrix products alone, at the rate of one large product measured here and now."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    a, b = torch.randn(512, 3072), torch.randn(3072, 3072)
    seconds = _best_of(lambda: a @ b)
    rate = 2 * 512 * 3072 * 3072 / seconds
    matrix_elements = layers * 12 * 768**2 + 50257 * 768
    return 6 * matrix_elements * BATCH * LENGTH / rate


def report(result: dict[str, Any]) -> str:
    """Return a title, the rows with their ratios to the first, and the floor."""
    title = f"{result['layers']} layers, {result['world']} rank(s), {BATCH} x {LENGTH} tokens per rank"
    if result.get("cold"):
        return f"{title}, first step with empty caches, medians of {result['rounds']}:\n\n{cold_table(result)}"
    floor = f"Floor (the matrix products alone, at the rate measured in this run): {result['floor_s']:.2f} s."
    return f"{title}, medians of {result['rounds']} steps:\n\n{table(result)}\n\n{floor}"


def table(result: dict[str, Any]) -> str:
    """Return the rows as text, each with its ratio to the first."""
    base = result["rows"][0]
    rows = [
        [
            row["peer"],
            f"{row['step_s']:.2f}",
            f"{row['step_s'] / base['step_s']:.2f}",
            f"{row['cpu_s']:.2f}",
            f"{row['first_step_s']:.1f}",
            f"{row['peak_pss_gib']:.2f}",
        ]
        for row in result["rows"]
    ]
    headers = ["peer", "step s", f"/ {base['peer']}", "CPU s, all ranks", "first step s", "peak PSS GiB per rank"]
    return tabulate(rows, headers, tablefmt="github")


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


def _best_of(run: Callable[[], object]) -> float:
    times = []
    for _ in range(10):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _peak_pss_gib() -> float:
    """Return the most memory this process held since its peak was forgotten, shared pages counted by their share.

    The kernel keeps the peak of RSS, exactly and for free, but none of PSS. What is shared here are libraries, which stay: so
    what PSS is below RSS now is taken off the peak.
    """
    peak = _kib("/proc/self/status", "VmHWM:")
    shared = _kib("/proc/self/smaps_rollup", "Rss:") - _kib("/proc/self/smaps_rollup", "Pss:")
    return (peak - shared) / 2**20


def _kib(path: str, field: str) -> int:
    return int(next(line for line in Path(path).read_text().splitlines() if line.startswith(field)).split()[1])


def _seconds_compiling() -> float | None:
    """Return the wall seconds in which this backend was compiling regions; None for the other peers."""
    inductor = sys.modules.get("zinf_compile.inductor")
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
    parser.add_argument("--readme", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.readme:
        _readme.write("benchmarks/step.py", (report(json.loads(path.read_text())) for path in options.readme))
        return
    names = installed(options.peers.split(",") if options.peers else PEERS[options.world])
    run, rounds = (measure_cold, 3) if options.cold else (measure, 7)
    result = run(names, world=options.world, layers=options.layers, rounds=options.rounds or rounds)
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
