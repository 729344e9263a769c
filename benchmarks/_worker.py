"""The process of a peer: takes steps on command, and answers with their time and memory.

Standard library only: peers that live in an environment of their own import this too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TakeStep = Callable[[Any, Any], Any]
"""`take(tokens, targets)` makes one step and returns its loss."""


def stepping(call: Callable[[Any, Any], Any], optimizer: Any) -> TakeStep:
    """Return a plain training step of `call`, which returns its loss."""

    def take(tokens: Any, targets: Any) -> Any:
        loss = call(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return take


def serve(
    commands: Any,
    draw: Callable[[], tuple[Any, Any]],
    make: Callable[[], TakeStep],
    *,
    more: Mapping[str, Callable[[], Any]] | None = None,
) -> None:
    """Answer the commands of a connection until it says "end" or closes.

    "step" is answered with (wall s, CPU s, loss), on what `draw` returns; the first one's time includes `make`. "rest" is
    answered once nothing is left to be done of a step, "peak" with GiB, those in `more` with what they return.
    """
    take: TakeStep | None = None
    while (command := _next(commands)) != "end":
        if command == "step":
            tokens, targets = draw()
            wall, cpu = time.perf_counter(), time.process_time()
            take = take or make()
            loss = take(tokens, targets).item()
            commands.send((time.perf_counter() - wall, time.process_time() - cpu, loss))
        elif command == "rest":
            commands.send((more or {}).get("rest", int)())
        elif command == "forget peak":
            Path("/proc/self/clear_refs").write_text("5")
            commands.send(0)
        elif command == "peak":
            commands.send(_peak_pss_gib())
        else:
            commands.send((more or {})[command]())
    commands.send("ended")


def _next(commands: Any) -> Any:
    try:
        return commands.recv()
    except EOFError:
        raise SystemExit("the benchmark has ended") from None


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
