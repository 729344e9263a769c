"""Seconds of transfers and regions on a machine's profile, for the critical path of `zinf dump --machine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zinf_compile.ir.op_spec import COPY_IN, COPY_OUT, GATHER, READ, REDUCE, WRITE
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.transfer_graph import COMPUTE, add_seconds
from zinf_compile.plan.on_paper import place
from zinf_compile.plan.problem_parts import Link

from .dump_error import DumpError
from .measure_machine import profile_named
from .trace import Scheduled


def time_transfers(found: Sequence[Scheduled], machine: str, *, world: int) -> None:
    """Give the nodes of each graph's transfers their seconds on a machine, with one drive where the schedule needs one."""
    profile = profile_named(machine)
    lanes = {facts["lane"] for each in found for _, facts in each.transfers.nodes.items()}
    drives = int(bool(lanes & {READ, WRITE}))
    links = place(profile, world=world, device_memory=0, host_memory=None, drives=drives).links
    by_lane = {_lane(link): link for link in links}

    def seconds(lane: str, count: int, operations: Mapping[str, int]) -> float:
        if lane == COMPUTE:
            computing = sum(done / profile.flops(dtype) for dtype, done in operations.items())
            return max(computing, count / profile.device_bytes_per_second)
        if lane not in by_lane:
            raise DumpError(
                f"machine {machine!r} has no link for {lane}: its device {'is' if profile.host_is_device else 'is not'} host "
                "memory; accepted: a machine that fits --device"
            )
        return by_lane[lane].seconds(count)

    for each in found:
        add_seconds(each.transfers, seconds)


def _lane(link: Link) -> str:
    ends = link.source, link.destination
    if None in ends:
        return GATHER if link.source is None else REDUCE
    if Tier.NVME in ends:
        return READ if link.source is Tier.NVME else WRITE
    return COPY_IN if link.destination is Tier.DEVICE else COPY_OUT
