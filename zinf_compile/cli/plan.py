"""`zinf plan`: what a model's step comes to on a machine, with these budgets: no weight is allocated, and nothing runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from zinf_compile.config import AUTO, Config
from zinf_compile.errors import BudgetError, OptionError, PlanError
from zinf_compile.ir.sizes import parse_bytes
from zinf_compile.ir.tiers import Tier, all_tiers
from zinf_compile.passes.analysis.step_facts import StepFacts
from zinf_compile.plan.collector import rare_collections
from zinf_compile.plan.critical_path import CriticalPath, critical_path
from zinf_compile.plan.lower_bound import Bound, lower_bound
from zinf_compile.plan.on_paper import Place, compute_bound_at, least_budgets, life_days, place, written_bytes
from zinf_compile.plan.page import Shown, page
from zinf_compile.plan.perfetto import trace_events
from zinf_compile.plan.plan import Plan
from zinf_compile.plan.planners import PLANNERS
from zinf_compile.plan.planners.just_in_time import just_in_time
from zinf_compile.plan.problem import StepProblem
from zinf_compile.plan.problem_parts import KEEP, Allowed
from zinf_compile.plan.profile import Profile, shipped
from zinf_compile.plan.simulate import Timeline, simulate
from zinf_compile.plan.table import homes_table, in_seconds, rounded_up, summary_line
from zinf_compile.plan.verify import check

from .dump_error import DumpError
from .measure_machine import HERE, profile_named
from .models import DEEP, TARGETS
from .output_files import check_file, write_file
from .plan_explained import explained
from .step_on_paper import Blocks, paper_step
from .target import NAMED

MOST = 1_000_000
"""Ranks, and what else is counted."""

_MOST_DRIVES = 1024
"""Of a node."""

_FLAGS = {
    "device_memory": "--device-memory",
    "host_memory": "--host-memory",
    Tier.NVME: "--nvme 1x",
    "planner": "--planner",
    "machine": "--machine",
}
"""Options of torch.compile for which the command has an argument."""

_KINDS = {"params": "params", "grads": "grads", "optimizer": "states", "update": "update"}
"""Options that say where something lives, or is updated, by their field of `Allowed`."""


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "plan",
        help="predict a model's step on a machine, within budgets",
        description="Trace a model on fake tensors, plan a step on a machine's profile, and print who lives where, the predicted "
        "step beside a bound that no plan can beat, and what sets it; where it does not fit, budgets that do.",
    )
    parser.add_argument("target", metavar="TARGET", help=f"{NAMED}, as for `zinf dump`; or {', '.join(TARGETS)}")
    parser.add_argument("--machine", metavar="NAME", required=True, help=f"{', '.join(shipped())}; {HERE}; or a profile's file")
    parser.add_argument("--world", metavar="N", type=count, default=1, help="as one of N ranks (default 1)")
    parser.add_argument("--device-memory", metavar="BYTES", type=_sizes, help="of a rank; several, with commas, side by side")
    parser.add_argument("--host-memory", metavar="BYTES", type=_size, help="of a node, for all its ranks")
    parser.add_argument("--nvme", metavar="N", type=_drives, default=0, help="drives of a node, such as 4x (default: none)")
    parser.add_argument("--micro-batches", metavar="N", type=count, default=1, help="in a step (default 1)")
    parser.add_argument("--planner", choices=list(PLANNERS), default="cached_prefetch", help="default: cached_prefetch")
    parser.add_argument(
        "--blocks",
        metavar="LIST=N",
        type=_blocks,
        help="plan for N blocks in the model's list of this name, such as layers=126; those that the target lacks are copies of "
        f"its middle one, and it needs 5. Default: as many as it has ({' and '.join(DEEP)} are planned so)",
    )
    parser.add_argument("--options", metavar="JSON", default="{}", help="options of torch.compile, as JSON")
    parser.add_argument("--explain", action="store_true", help="print the formulas of ZeRO with the model's numbers")
    parser.add_argument("--json", action="store_true", help="for programs; keys: see zinf_compile/cli/plan.py")
    parser.add_argument("--perfetto", metavar="FILE", type=Path, help="write the timeline for ui.perfetto.dev")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write one page with all lanes and memories")
    parser.set_defaults(run=run)


@rare_collections()
def run(options: argparse.Namespace) -> str:
    """Return the command's output; `options.status` is 1 where not all budgets fit."""
    began = time.monotonic()
    for file in (options.perfetto, options.html):
        if file is not None:
            check_file(file)
    profile = profile_named(options.machine)
    given = _options(options.options)
    host = options.host_memory or profile.host_memory_bytes or None
    devices = options.device_memory or [profile.device_memory_bytes]
    where = place(profile, world=options.world, device_memory=devices[0], host_memory=host, drives=options.nvme)
    step = paper_step(
        options.target,
        given,
        _facts(profile, where, options.world, given),
        host_is_device=profile.host_is_device,
        micro_batches=options.micro_batches,
        blocks=options.blocks,
    )
    found = [Planned(step.problem.with_budgets(device=device), options.planner) for device in devices]
    reports = [_report(each, profile, options, step.tokens * options.micro_batches) for each in found]
    options.status = int(any(each.plan is None for each in found))
    if options.perfetto is not None:
        timelines = [(each.title, each.timeline) for each in found if each.timeline is not None]
        events = [e for number, (title, t) in enumerate(timelines, 1) for e in trace_events(t, name=title, process=number)]
        write_file(options.perfetto, json.dumps({"traceEvents": events}), options)
    if options.html is not None:
        shown = [Shown(each.title, each.problem, each.timeline, row) for each, row in zip(found, reports, strict=True)]
        write_file(options.html, page(f"{options.target} on {options.world} ranks of {profile.name}", shown), options)
    seconds = time.monotonic() - began
    if options.json:
        blocks = None if step.blocks is None else dataclasses.asdict(step.blocks)
        head = {"target": options.target, "machine": profile.name, "seconds": seconds, "blocks": blocks}
        return json.dumps({**head, "budgets": reports}, indent=2)
    parts = [_text(each, row) for each, row in zip(found, reports, strict=True)]
    if step.blocks is not None:
        parts.append(str(step.blocks))
    if options.explain:
        parts.append(explained(step.problem, profile, tokens=step.tokens))
    return "\n\n".join(parts)


class Planned:
    """One problem with its plan, its timeline and its bound; none of these where nothing fits."""

    def __init__(self, problem: StepProblem, planner: str) -> None:
        self.problem = problem
        self.title = f"{_gib(problem.memories[0].bytes)} of device memory"
        self.plan: Plan | None = None
        self.timeline: Timeline | None = None
        self.bound: Bound | None = None
        self.path: CriticalPath | None = None
        self.least: dict[Tier, int] | None = None
        began = time.monotonic()
        try:
            self.plan = PLANNERS[planner](problem)
        except BudgetError:
            self.least = least_budgets(problem, just_in_time)
        self.planner_seconds = time.monotonic() - began
        if self.plan is not None:
            check(problem, self.plan)
            self.timeline = simulate(problem, self.plan)
            self.bound = _bound(problem)
            self.path = critical_path(problem, self.plan)


def _bound(problem: StepProblem) -> Bound:
    try:
        return lower_bound(problem, idle_links=True)
    except BudgetError as error:  # the plan is checked
        raise PlanError("no bound is found for a step that has a legal plan; please report it, with the command") from error


def _allowed(given: Mapping[str, Any], tiers: Sequence[Tier]) -> Allowed:
    """Return what the words of options allow on a machine with these tiers."""
    found: dict[str, tuple[Tier, ...]] = {}
    for option, kind in _KINDS.items():
        word = given.get(option)
        if word not in all_tiers():  # "auto", none, or what tracing refuses
            continue
        tier = Tier(word)
        if tier not in tiers and tier.in_folders:
            raise DumpError(f"option {option}={word!r} needs drives of a known speed; give their number, such as --nvme 1x")
        found[kind] = (tier if tier in tiers else Tier.DEVICE,)  # a device that is host memory
    return Allowed(**found)


def _facts(profile: Profile, where: Place, world: int, given: Mapping[str, Any]) -> StepFacts:
    kept, stay = given.get("activations") == KEEP, given.get("reshard_after_backward") is False
    sharers = min(world, profile.devices_per_node)
    return StepFacts(
        memories=where.memories,
        links=where.links,
        allowed=_allowed(given, [memory.tier for memory in where.memories]),
        world_size=world,
        flops_per_second=lambda dtype: profile.flops(str(dtype).removeprefix("torch.")),
        bytes_per_second=profile.device_bytes_per_second,
        state_types=lambda slot: (torch.float32,) * (2 if slot.dtype == torch.float32 else 3),
        stays=lambda slot: stay and not slot.in_tiles,
        has_master=lambda slot: slot.dtype != torch.float32,
        host_update_bytes_per_second=profile.host_bytes_per_second / sharers,
        device_update_bytes_per_second=profile.device_bytes_per_second,
        saved_choices=(KEEP, *(() if kept else (str(memory.tier) for memory in where.memories[1:]))),
    )


def _report(each: Planned, profile: Profile, options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Return one budget's part of `--json`.

    Keys are added in later versions, never renamed. Bytes and seconds are those of one rank and one step, budgets as given.

        fits, budgets         whether a plan was found; bytes by tier, for one rank
        least                 where it does not fit: the least budgets that do if all moves just in time, and no saved value, by
                              tier, of all ranks that share it; null: none. The planner given may do with less
        step, bound, bound_by seconds as simulated; seconds below which no plan is; the lane that is busiest in the bound
        critical_path         seconds by lane of the chain of tasks that sets the step's length
        tokens_per_second     of all ranks
        peak, busy, waited    bytes by tier; busy seconds by lane; seconds that compute waits for each lane
        written, drive_life_days   bytes that go to drives; days until they have written what their maker says (null: no limit)
        tokens_factor         so many times the tokens make compute as long as the busiest link; 1: it is already
        planner, planner_seconds, plan   the plan as `Plan.to_json` writes it is in `plan`
    """
    problem = each.problem
    report: dict[str, Any] = {
        "fits": each.plan is not None,
        "budgets": {str(m.tier): None if m.bytes is None else m.bytes // m.sharers for m in problem.memories},
        "planner": options.planner,
        "planner_seconds": each.planner_seconds,
    }
    if each.plan is None or each.timeline is None or each.bound is None:
        return {**report, "least": None if each.least is None else {str(tier): count for tier, count in each.least.items()}}
    timeline = each.timeline
    written = written_bytes(problem, timeline)
    sharers = min(options.world, profile.devices_per_node)
    life = None
    if profile.drive is not None and options.nvme:
        life = life_days(profile.drive, drives=options.nvme, written=written * sharers, seconds=timeline.seconds)
    return {
        **report,
        "step": timeline.seconds,
        "bound": each.bound.seconds,
        "bound_by": each.bound.by,
        "critical_path": {} if each.path is None else each.path.by_lane(),
        "tokens_per_second": tokens * options.world / timeline.seconds,
        "peak": {str(tier): count for tier, count in timeline.peak.items()},
        "busy": {lane: timeline.busy(lane) for lane in timeline.lanes},
        "waited": dict(timeline.waited),
        "written": written,
        "drive_life_days": life,
        "tokens_factor": compute_bound_at(problem, timeline),
        "plan": json.loads(each.plan.to_json()),
    }


def _text(each: Planned, row: dict[str, Any]) -> str:
    if each.plan is None or each.timeline is None or each.bound is None:
        if each.least is None:
            return f"{each.title}: it does not fit, whatever the budgets; give it a farther tier (--nvme), or more ranks"
        given = {memory.tier: memory.bytes for memory in each.problem.memories}
        grown = [f"{tier} {rounded_up(count)}" for tier, count in each.least.items() if count != given[tier]]
        least = ", ".join(grown)
        return f"{each.title}: it does not fit; the least that does, where all moves just in time but no saved value: {least}"
    lines = [
        summary_line(each.problem, each.timeline, bound=each.bound.seconds, by=each.bound.by),
        homes_table(each.problem, each.plan),
        f"{row['tokens_per_second']:,.1f} tokens/s on all ranks; planned in {each.planner_seconds:.1f} s",
    ]
    if each.path is not None:
        lines.append(each.path.text())
    factor = row["tokens_factor"]
    lines.append("compute sets the step" if factor <= 1.01 else f"{factor:.1f} times the tokens make it compute-bound")
    if row["written"]:
        life = row["drive_life_days"]
        days = f"; drives last {life:,.0f} days of it" if life is not None else ""
        lines.append(f"{_gib(row['written'])} written to drives by each rank and step{days}")
    busy = [
        [lane, in_seconds(s), f"{s / row['step']:.0%}", in_seconds(row["waited"].get(lane, 0.0))]
        for lane, s in row["busy"].items()
    ]
    lines.append(tabulate(busy, headers=["lane", "busy", "of the step", "compute waits"], disable_numparse=True))
    return "\n".join(lines)


def _gib(count: int | None) -> str:
    if count is None:
        return "no limit"
    if count < 10_000:
        return f"{count:,} bytes"
    return f"{count / 2**30:,.1f} GiB" if count >= 2**28 else f"{count / 2**20:,.2f} MiB"


def _options(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DumpError(f'--options is not JSON ({error}); accepted: an object such as \'{{"bucket": "8MiB"}}\'') from error
    if not isinstance(value, dict):
        raise DumpError(f"--options is a {type(value).__name__}; accepted: an object")
    for option in _FLAGS.keys() & value.keys():
        raise DumpError(f"option {option} is an argument of `zinf plan`: give {_FLAGS[option]} in its place")
    if value.get("activations") in all_tiers():
        raise DumpError(
            f"option activations={value['activations']!r} is not planned by: saved values move where the budget has no room for "
            f"them; accepted: {AUTO!r}, {KEEP!r}, 'recompute'"
        )
    words = [Tier(value[option]) for option in _KINDS if value.get(option) in all_tiers()]
    folders = {tier: "." for tier in words if tier.in_folders}  # a tier's folder is the option of its name; nothing is written
    given = {"compute": "fx", **folders, **value}
    Config.from_options(given)
    return given


def _size(text: str) -> int:
    try:
        return parse_bytes(text, option="memory")
    except OptionError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; accepted: bytes, or text such as 80GiB") from error


def _sizes(text: str) -> Sequence[int]:
    return [_size(part) for part in text.split(",")]


def count(text: str) -> int:
    """Parse a number of ranks, or of other things, of which there is one at least."""
    if not _is_count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST:,}")
    return int(text)


def _drives(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,4})x?", text)
    if not found or int(found[1]) > _MOST_DRIVES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of drives; accepted: 1x, 4x, ... to {_MOST_DRIVES}x; 0 for none"
        )
    return int(found[1])


def _blocks(text: str) -> Blocks:
    name, _, number = text.partition("=")
    if not name or not _is_count(number):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of blocks; accepted: LIST=N, such as layers=126, with N from 1 to {MOST:,}"
        )
    return Blocks(name, int(number))


def _is_count(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,7}", text) is not None and 1 <= int(text) <= MOST
