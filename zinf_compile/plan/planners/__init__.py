"""Planners: functions from a problem to a plan, each in a file of its name.

cached_prefetch — The default: what is used again soonest stays, the next missing is fetched first, as early as memory allows.
greedy — Everything is released behind its use, and brought back as early as memory allows.
just_in_time — Nothing ahead: each unit is brought when its region is reached, and released behind it.
largest_first — The largest units stay between uses as long as there is room; the others come one use ahead, as FSDP2's do.
one_ahead — The unit of the next region is on its way while one computes, as hooks of ZeRO-3 do it.
_build — Plans from residencies: rows for all hops, and updates behind the last region.
_expected — Seconds that a step is expected to take with given homes: part by part, compute or a link.
_from_walk — What stays and what is stored if everything stays but what a walk moves.
_gaps — The gaps of a problem with given homes: what may stay on the device between two uses.
_homes — Choices of homes, from everything far away to everything near.
_near_homes — Homes that differ a little from others: one kind comes nearer, another goes away; climbs from one to the next.
_residency — Chooses which gaps are bridged by staying, for rooms on a ladder.
_start_early — Moves the starts of transfers forward into memory that is left.
_updates — When pieces of states are updated: behind the last region, or just before their units are used again.
_walk — Walks through steps boundary by boundary and starts each transfer as early as memory allows.
"""

from __future__ import annotations

from collections.abc import Callable

from zinf_compile.plan.plan import Plan
from zinf_compile.plan.problem import StepProblem

from .cached_prefetch import cached_prefetch
from .greedy import greedy
from .just_in_time import just_in_time
from .largest_first import largest_first
from .one_ahead import one_ahead

PLANNERS: dict[str, Callable[[StepProblem], Plan]] = {
    planner.__name__: planner for planner in (just_in_time, one_ahead, largest_first, greedy, cached_prefetch)
}
"""By name, the default last."""

__all__ = ["PLANNERS", "cached_prefetch", "greedy", "just_in_time", "largest_first", "one_ahead"]
