"""A plan as text: who lives where, and what happens at each boundary. `zinf plan` and logs print it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from tabulate import tabulate

from .plan import Fetch, Gather, Homes, Plan, Reduction, Remake, Store, Update
from .problem import StepProblem
from .simulate import Timeline


def homes_table(problem: StepProblem, plan: Plan) -> str:
    """Return the share of the bytes of each kind of state by tier, and what becomes of saved values."""
    homes = plan.local.homes
    kinds: dict[str, dict[str, int]] = {
        "parameters": _by_tier((homes.params[unit.name], unit.stored_bytes) for unit in problem.units),
        "gradients": _by_tier((homes.grads[unit.name], unit.gradient_bytes) for unit in problem.units if unit.trained),
        "states": _by_tier((homes.states[piece.name], piece.state_bytes) for piece in problem.pieces),
    }
    stored = {store.name: str(store.to) for store in plan.local.stores if store.name in problem.value}
    remade = {name for remake in plan.shared.remakes for name in remake.values}
    kinds["saved values"] = _by_tier(
        ("recompute" if value.name in remade else stored.get(value.name, "keep"), value.bytes) for value in problem.saved
    )
    columns = [*map(str, problem.tiers), "keep", "recompute"]
    rows = [
        [kind, f"{sum(own.values()):,}", *(f"{own[c] / sum(own.values()):.0%}" if own.get(c) else "" for c in columns)]
        for kind, own in kinds.items()
        if sum(own.values())
    ]
    return tabulate(rows, headers=["", "bytes", *columns])


def shares_line(problem: StepProblem, homes: Homes) -> str:
    """Return the share of each kind of state by tier, in one line."""
    kinds = {
        "parameters": _by_tier((homes.params[unit.name], unit.stored_bytes) for unit in problem.units),
        "gradients": _by_tier((homes.grads[unit.name], unit.gradient_bytes) for unit in problem.units if unit.trained),
        "states": _by_tier((homes.states[piece.name], piece.state_bytes) for piece in problem.pieces),
    }
    parts = []
    for kind, own in kinds.items():
        if total := sum(own.values()):
            shares = [f"{tier} {own[tier] / total:.0%}" for tier in map(str, problem.tiers) if own.get(tier)]
            parts.append(f"{kind}  {', '.join(shares)}")
    return "     ".join(parts)


def _by_tier(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for tier, size in rows:
        found[str(tier)] += size
    return found


def schedule_table(problem: StepProblem, plan: Plan) -> str:
    """Return a line for each boundary: what compute waits for there, what starts, what is released, and the region behind it."""
    count = problem.count
    due: dict[int, list[str]] = defaultdict(list)
    starts: dict[int, list[str]] = defaultdict(list)
    freed: dict[int, list[str]] = defaultdict(list)
    for row in plan.rows():
        name = describe(row)
        if isinstance(row, Remake):
            starts[row.before].append(name)
            continue
        starts[row.start % count or (count if isinstance(row, Update | Reduction | Store) else 0)].append(name)
        due[row.due % count or (count if isinstance(row, Update | Reduction | Store) and row.due else 0)].append(name)
        if isinstance(row, Gather | Fetch):
            freed[row.until % count or count].append(row.unit if isinstance(row, Gather) else f"{row.name} on {row.to}")
    rows = [
        [
            boundary,
            ", ".join(due[boundary]),
            ", ".join(starts[boundary]),
            ", ".join(freed[boundary]),
            problem.regions[boundary].name if boundary < count else "(step)",
        ]
        for boundary in range(count + 1)
    ]
    return tabulate(rows, headers=["boundary", "due", "starts", "released", "region"])


def describe(row: Gather | Reduction | Remake | Fetch | Store | Update) -> str:
    """Return a row in a few words."""
    if isinstance(row, Gather):
        return f"gather {row.unit}"
    if isinstance(row, Reduction):
        return f"reduce {row.unit}"
    if isinstance(row, Remake):
        return f"make {', '.join(row.values)} again"
    if isinstance(row, Update):
        return f"update {row.piece} on {row.on}"
    return f"{row.kind} {row.name} {row.source}→{row.to}"


def summary_line(problem: StepProblem, timeline: Timeline, *, bound: float, by: str) -> str:
    """Return the line that a log begins with: seconds, the bound and what sets it, and memory against its budgets."""
    parts = [f"step {in_seconds(timeline.seconds)} (bound {in_seconds(bound)}, by {by})"]
    for memory in problem.memories:
        if memory.bytes is not None:
            parts.append(f"{memory.tier} {_gib(timeline.peak[memory.tier])} of {_gib(int(problem.room(memory.tier)))}")
    return ", ".join(parts)


def in_seconds(seconds: float) -> str:
    """Return seconds as text: with two decimals, or two digits where those would show none."""
    return f"{seconds:.2f} s" if seconds >= 0.1 or not seconds else f"{seconds:.2g} s"


def rounded_up(count: int) -> str:
    """Return a budget as text that, given back, is no smaller, and at most a per mille larger."""
    unit, name = (2**30, "GiB") if count >= 2**28 else (2**20, "MiB")
    digits = max(0, 3 - math.floor(math.log10(max(count, 1) / unit)))
    return f"{math.ceil(count / unit * 10**digits) / 10**digits:.{digits}f} {name}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**28 else f"{count:,} bytes"
