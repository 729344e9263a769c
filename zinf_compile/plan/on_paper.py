"""What a plan comes to on a machine's profile: its tiers and links, what a step writes, which budgets fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

from zinf_compile.errors import BudgetError, PlanError
from zinf_compile.ir.tiers import Tier

from .plan import Plan
from .problem import StepProblem
from .problem_parts import Beside, Link, Memory
from .profile import Drive, Profile
from .simulate import Timeline
from .unroll import COMPUTE

STEP_SECONDS = 60.0
"""Rates of a drive are those that it keeps up for longer than this."""
HARDER = 1.6
"""Growth of budgets between two tries."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a profile comes to for one rank of so many."""

    memories: tuple[Memory, ...]
    links: tuple[Link, ...]


def place(profile: Profile, *, world: int, device_memory: int, host_memory: int | None, drives: int) -> Place:
    """Return tiers and links of one of `world` ranks. `device_memory` is of a rank, `host_memory` and `drives` of a node.

    A node has as many ranks as the profile's has devices, or all of them; they share its host memory and its drives in equal
    parts. `host_memory` None: no limit is known. Raises `PlanError` for drives that the profile does not know.
    """
    sharers = min(world, profile.devices_per_node)
    memories = [Memory(tier=Tier.DEVICE, bytes=device_memory)]
    links: list[Link] = []
    latency = profile.latency_seconds
    if not profile.host_is_device:
        memories.append(Memory(tier=Tier.HOST, bytes=host_memory, sharers=sharers))
        for source, end, rate in (
            (Tier.HOST, Tier.DEVICE, profile.to_device_bytes_per_second),
            (Tier.DEVICE, Tier.HOST, profile.from_device_bytes_per_second),
        ):
            links.append(
                Link(name=f"{source} to {end}", source=source, destination=end, bytes_per_second=rate, latency_seconds=latency)
            )
    if drives:
        if profile.drive is None:
            raise PlanError(
                f"machine {profile.name!r} has no drive; leave --nvme out, or measure one: zinf doctor --nvme DIR --profile FILE"
            )
        links += _of_drive(profile.drive, memories[-1].tier, drives=drives, sharers=sharers, latency=latency)
        memories.append(Memory(tier=Tier.NVME, bytes=profile.drive.capacity_bytes * drives or None, sharers=sharers))
    if world > 1:
        inside = profile.ranks_bytes_per_second or profile.network_bytes_per_second
        rate = inside if world <= profile.devices_per_node else profile.network_bytes_per_second or inside
        if not rate:
            raise PlanError(f"machine {profile.name!r} has no rate between ranks, and {world} ranks were asked for")
        between = Link(
            name="gather", source=None, destination=Tier.DEVICE, bytes_per_second=rate, latency_seconds=latency, lane="ranks"
        )
        links += [between, dataclasses.replace(between, name="reduce", source=Tier.DEVICE, destination=None)]
    return Place(memories=tuple(memories), links=tuple(links))


def _of_drive(drive: Drive, near: Tier, *, drives: int, sharers: int, latency: float) -> Iterator[Link]:
    rates = [rate for rate in drive.rates if not rate.seconds or rate.seconds >= STEP_SECONDS] or list(drive.rates)
    rate = max(rates, key=lambda each: each.extent_bytes or math.inf)
    alone = {True: rate.read_bytes_per_second, False: rate.write_bytes_per_second}
    both = rate.both_bytes_per_second or min(alone.values())
    names = {True: f"nvme to {near}", False: f"{near} to nvme"}
    for reads, source, end in ((True, Tier.NVME, near), (False, near, Tier.NVME)):
        beside = min(alone[reads], both * alone[reads] / sum(alone.values()))
        yield Link(
            name=names[reads],
            source=source,
            destination=end,
            bytes_per_second=alone[reads] * drives,
            latency_seconds=latency,
            beside=(Beside(link=names[not reads], bytes_per_second=beside * drives),),
            sharers=sharers,
        )


def written_bytes(problem: StepProblem, timeline: Timeline) -> int:
    """Return the bytes that one rank writes to drives in a step."""
    into = {link.name for link in problem.links if link.destination is Tier.NVME}
    lanes = {link.on_lane for link in problem.links if link.name in into}
    inside = (span.bytes for lane in lanes for span in timeline.lanes.get(lane, ()) if 0 <= span.start < timeline.seconds)
    return sum(inside)


def life_days(drive: Drive, *, drives: int, written: float, seconds: float) -> float | None:
    """Return the days until drives have written what their maker says, at `written` bytes of a node in a step of `seconds`."""
    if not drive.writes_bytes or not written:
        return None
    return drive.writes_bytes * drives / written * seconds / 86400


def compute_bound_at(problem: StepProblem, timeline: Timeline) -> float:
    """Return by which factor tokens must grow until compute, which grows with them, lasts as long as the busiest link.

    1 where it does already. Saved values, which grow too, are taken off.
    """
    busy = 0.0
    for lane in {link.on_lane for link in problem.links}:
        spans = [span for span in timeline.lanes.get(lane, ()) if " saved " not in span.name]
        busy = max(busy, math.fsum(span.end - span.start for span in spans))
    compute = math.fsum(span.end - span.start for span in timeline.lanes.get(COMPUTE, ()))
    return max(1.0, busy / compute) if compute else math.inf


def least_budgets(problem: StepProblem, planner: Callable[[StepProblem], Plan]) -> dict[Tier, int] | None:
    """Return budgets in which a planner finds a plan, grown from the problem's own until it does; None: no memory would do.

    Each is the least for the other one as it is: to a per cent.
    """
    budgets = {memory.tier: memory.bytes for memory in problem.memories if memory.tier.in_memory and memory.bytes is not None}
    if not _fits(problem.with_budgets(**dict.fromkeys(map(str, budgets))), planner):
        return None
    grown = dict(budgets)
    while not _fits(problem.with_budgets(**{str(tier): count for tier, count in grown.items()}), planner):
        grown = {tier: int(max(count, 1 << 20) * HARDER) for tier, count in grown.items()}
    for tier, least in budgets.items():
        low, high = least, grown[tier]
        while high - low > high // 100:
            middle = (low + high) // 2
            tried = {**grown, tier: middle}
            if _fits(problem.with_budgets(**{str(t): count for t, count in tried.items()}), planner):
                high = middle
            else:
                low = middle
        fits_as_given = _fits(problem.with_budgets(**{str(t): c for t, c in {**grown, tier: least}.items()}), planner)
        grown[tier] = least if fits_as_given else high
    return grown


def _fits(problem: StepProblem, planner: Callable[[StepProblem], Plan]) -> bool:
    try:
        planner(problem)
    except BudgetError:
        return False
    return True
