"""One training step of a 124M GPT beside its peers: wall time, CPU time, time to the first step, memory per rank.

    python benchmarks/step.py                      # one process: eager, Inductor, this backend
    python benchmarks/step.py --world 2            # two gloo ranks of one thread: DDP, FSDP2, this backend
    python benchmarks/step.py --json step.json     # keep the numbers
    python benchmarks/step.py --readme step.json   # measure nothing: write the README's table from kept numbers

All peers of a run are alive at once and take steps in turn, so a noisy machine is noisy for all; what counts are the ratios of
medians to the first peer. The floor is the time of the step's matrix products alone, at the speed measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

LENGTH, BATCH = 256, 2
PEERS: dict[int, tuple[str, ...]] = {
    1: ("inductor", "eager", "zinf fx", "zinf inductor"),
    2: ("ddp", "fsdp2", "zinf fx", "zinf inductor"),
}


def build(peer: str, layers: int) -> tuple[Any, Any]:
    """Return (what is called, the module whose parameters are trained)."""
    import torch  # noqa: PLC0415  (in the worker: the environment decides about threads and caches)

    from zinf_compile.targets import GPT  # noqa: PLC0415

    torch.manual_seed(0)
    model = GPT(layers=layers, width=768, heads=12, vocabulary=50257, length=LENGTH)
    if peer == "eager":
        return model, model
    if peer == "inductor":
        return torch.compile(model), model
    if peer == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model), model
    if peer.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        for block in model.h:
            fully_shard(block)
        fully_shard(model)
        return (torch.compile(model) if peer == "fsdp2 compiled" else model), model
    return torch.compile(model, backend="zero_infinity", options={"compute": peer.removeprefix("zinf ")}), model


def work(peer: str, rank: int, world: int, layers: int, rendezvous: str, commands: Any) -> None:
    """Serve commands: each "step" is answered with (wall seconds, CPU seconds), "memory" with PSS and its peak in GiB."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{rendezvous}-cache-{rank}"
    os.environ["OMP_WAIT_POLICY"] = "passive"  # peers that wait for their turn must not burn the others' cores
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    call, model = build(peer, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(rank)
    while (command := commands.recv()) != "end":
        if command == "memory":
            commands.send((_pss_gib(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20))
            continue
        tokens = torch.randint(50257, (BATCH, LENGTH), generator=generator)
        wall, cpu = time.perf_counter(), time.process_time()
        call(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        commands.send((time.perf_counter() - wall, time.process_time() - cpu))
    commands.send("ended")
    os._exit(0)


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
        self.first_s = self.step()[0]
        self.steps: list[tuple[float, float]] = []

    def step(self) -> tuple[float, float]:
        """Take one step on all ranks; return the slowest rank's wall seconds and all ranks' CPU seconds."""
        answers = self._ask("step")
        return max(wall for wall, _ in answers), sum(cpu for _, cpu in answers)

    def memory_gib(self) -> tuple[float, float]:
        """Return the largest rank's PSS now, and its peak RSS."""
        answers = self._ask("memory")
        return max(pss for pss, _ in answers), max(peak for _, peak in answers)

    def end(self) -> None:
        """Stop all ranks."""
        self._ask("end")
        for worker in self._workers:
            worker.join(timeout=10)

    def _ask(self, command: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(command)
        return [pipe.recv() for pipe in self._pipes]


def measure(names: Sequence[str], *, world: int, layers: int, rounds: int) -> dict[str, Any]:
    """Alternate the peers' steps; return the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        peers = [Peer(name, world, layers, folder) for name in names]
        for _ in range(rounds):
            for peer in peers:
                peer.steps.append(peer.step())
        rows = []
        for peer in peers:
            pss, peak = peer.memory_gib()
            rows.append(
                {
                    "peer": peer.name,
                    "step_s": statistics.median(wall for wall, _ in peer.steps),
                    "cpu_s": statistics.median(cpu for _, cpu in peer.steps),
                    "first_step_s": peer.first_s,
                    "pss_gib": pss,
                    "peak_rss_gib": peak,
                    "steps_s": [wall for wall, _ in peer.steps],
                }
            )
            peer.end()
    return {"world": world, "layers": layers, "rounds": rounds, "floor_s": floor_s(layers, world), "rows": rows}


def floor_s(layers: int, world: int) -> float:
    """Return the time of the step's matrix products alone, at the rate of one large product measured here and now."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    a, b = torch.randn(512, 3072), torch.randn(3072, 3072)
    seconds = _best_of(lambda: a @ b)
    rate = 2 * 512 * 3072 * 3072 / seconds
    matrix_elements = layers * 12 * 768**2 + 50257 * 768
    return 6 * matrix_elements * BATCH * LENGTH / rate


def write_readme(results: Sequence[dict[str, Any]]) -> None:
    """Replace the README's tables by those of `results`."""
    path = Path(__file__).parent.parent / "README.md"
    head, begin, rest = path.read_text().partition("<!-- benchmarks/step.py -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    if not begin or not end:
        raise SystemExit("README.md has no place marked <!-- benchmarks/step.py --> ... <!-- end -->")
    path.write_text(head + begin + "\n" + "\n\n".join(report(result) for result in results) + "\n\n" + end + tail)


def report(result: dict[str, Any]) -> str:
    """Return a title, the rows with their ratios to the first, and the floor."""
    title = f"{result['layers']} layers, {result['world']} rank(s), {BATCH} x {LENGTH} tokens per rank"
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
            f"{row['pss_gib']:.2f}",
            f"{row['peak_rss_gib']:.2f}",
        ]
        for row in result["rows"]
    ]
    headers = ["peer", "step s", f"/ {base['peer']}", "CPU s, all ranks", "first step s", "PSS GiB per rank", "peak RSS GiB"]
    return tabulate(rows, headers, tablefmt="github")


def _best_of(run: Callable[[], object]) -> float:
    times = []
    for _ in range(10):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _pss_gib() -> float:
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]) / 2**20


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, choices=sorted(PEERS), default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", help="names separated by commas; the first is the base of the ratios")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--readme", type=Path, metavar="FILE", nargs="+")
    options = parser.parse_args()
    if options.readme:
        write_readme([json.loads(path.read_text()) for path in options.readme])
        return
    names = options.peers.split(",") if options.peers else PEERS[options.world]
    result = measure(names, world=options.world, layers=options.layers, rounds=options.rounds)
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
