"""Peers that take steps in turn: their processes, their losses, and the rate of one large matrix product."""

from __future__ import annotations

import json
import math
import multiprocessing as mp
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

STEPS_FOR_MEMORY = 2
"""Steps of each peer after the timed ones, during which peak memory is measured."""


class Rank(NamedTuple):
    """A process of a peer: what it is told and answers goes through `pipe`."""

    pipe: Any
    join: Callable[[float], object]


def spawn(work: Callable[..., None], *args: Any) -> Rank:
    """Start `work(*args, connection)` in a fresh process of this Python."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()  # so that a rank that dies is noticed
    return Rank(ours, process.join)


def run(python: str, script: Path, settings: Mapping[str, Any]) -> Rank:
    """Start `script` with another Python, which is given the number of its connection's descriptor and the settings as JSON."""
    ours, theirs = mp.Pipe()
    process = subprocess.Popen(
        [python, str(script), str(theirs.fileno()), json.dumps(settings)],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.DEVNULL,  # what goes wrong is said on stderr
    )
    theirs.close()
    return Rank(ours, process.wait)


class Peer:
    """The ranks of one way to train, alive and waiting; one step has been taken."""

    def __init__(self, name: str, ranks: Sequence[Rank]) -> None:
        self.name = name
        self._ranks = ranks
        self.losses: list[float] = []
        self.first_s = self.step()[0]
        self.steps: list[tuple[float, float]] = []

    def step(self) -> tuple[float, float]:
        """Take one step on all ranks; return the slowest rank's wall seconds and all ranks' CPU seconds."""
        walls, cpus, losses = zip(*self.ask("step"), strict=True)
        self.losses.append(statistics.mean(losses))
        return max(walls), sum(cpus)

    def peak_pss_gib(self) -> float:
        """Take a few steps; return the most memory that a rank held during them."""
        self.ask("forget peak")
        for _ in range(STEPS_FOR_MEMORY):
            self.step()
        return max(self.ask("peak"))

    def end(self) -> None:
        """Stop all ranks."""
        self.ask("end")
        for rank in self._ranks:
            rank.join(10)

    def ask(self, command: str) -> list[Any]:
        """Return all ranks' answers to a command."""
        try:
            for rank in self._ranks:
                rank.pipe.send(command)
            return [rank.pipe.recv() for rank in self._ranks]
        except (EOFError, ConnectionError):
            raise SystemExit(f"{self.name}: a rank ended early; what it said is above") from None


def alternate(
    peers: Sequence[Peer], rounds: int, *, second: bool = False, account: bool = False, near: float = 1e-3
) -> list[dict[str, Any]]:
    """Have the peers take steps in turn, end them, and return a row of numbers for each.

    `second`: a turn is two steps, of which the second one counts, and whatever a peer has then left to do. What a step leaves
    to the next one is so counted once, and none of it is done in another peer's turn. `account`: a row has the first rank's
    answer to that command. `near`: the share by which losses may differ.
    """
    for _ in range(rounds):
        for peer in peers:
            if second:
                peer.step()
            peer.steps.append(peer.step())
            peer.ask("rest")
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
        | ({"account": peer.ask("account")[0]} if account else {})
        for peer in peers
    ]
    for peer in peers:
        peer.end()
    check_losses(rows, near)
    return rows


def check_losses(rows: Sequence[Mapping[str, Any]], near: float = 1e-3) -> None:
    """Exit if a peer's losses differ from the first one's by more than this share of them."""
    expected = rows[0]["losses"]
    for row in rows:
        if not all(math.isclose(a, b, rel_tol=near) for a, b in zip(row["losses"], expected, strict=True)):
            raise SystemExit(f"{row['peer']} trained something else: losses {row['losses']}; {rows[0]['peer']} had {expected}")


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of `alternate`'s rows, each with its ratio to the first: those that `headers` names."""
    return [
        [
            row["peer"],
            f"{row['step_s']:.2f}",
            f"{row['step_s'] / rows[0]['step_s']:.2f}",
            f"{row['cpu_s']:.2f}",
            f"{row['first_step_s']:.1f}",
            f"{row['peak_pss_gib']:.2f}",
        ]
        for row in rows
    ]


def matmul_rate(threads: int, dtype: Any = None) -> float:
    """Return the floating-point operations per second of one large matrix product, measured here and now."""
    import torch  # noqa: PLC0415  (not before the peers' processes are started: they don't need a parent that holds it)

    torch.set_num_threads(threads)
    a, b = torch.randn(512, 3072, dtype=dtype), torch.randn(3072, 3072, dtype=dtype)
    return 2 * 512 * 3072 * 3072 / best_of(lambda: a @ b)


def all_cores() -> int:
    """Return the number of threads of a single process."""
    return os.cpu_count() or 1


def best_of(run: Callable[[], object], settle: Callable[[], object] = int) -> float:
    """Return the fewest seconds of ten calls of `run`, each of which is over when `settle` returns."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        run()
        settle()
        times.append(time.perf_counter() - start)
    return min(times)
