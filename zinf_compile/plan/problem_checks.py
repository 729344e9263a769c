"""What a problem must fulfil. `StepProblem` calls `check_problem` when it is made."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from zinf_compile.errors import PlanError
from zinf_compile.ir.pieces import Granularity
from zinf_compile.ir.tiers import Tier

from .problem_parts import ProblemParts

GRANULARITIES = tuple(each.value for each in Granularity)


def check_problem(problem: ProblemParts) -> None:
    """Raise `PlanError` for the first part that makes no sense."""
    _check_names("unit", [row.name for row in problem.units])
    _check_names("saved value", [row.name for row in problem.saved])
    _check_names("piece of states", [row.name for row in problem.pieces])
    _check_names("link", [row.name for row in problem.links])
    if problem.world_size < 1:
        raise PlanError(f"{problem.world_size} ranks; accepted: 1 or more")
    _check_tiers(problem)
    _check_numbers(problem)
    _check_units(problem)
    _check_saved(problem)
    _check_pieces(problem)


def _check_names(kind: str, names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise PlanError(f"two {kind}s are named {sorted(twice)[0]!r}; names are unique")
    if "" in names:
        raise PlanError(f"a {kind} without a name")


def _check_tiers(problem: ProblemParts) -> None:
    tiers = problem.tiers
    if not tiers or tiers[0] != Tier.DEVICE:
        raise PlanError(f"tiers {', '.join(tiers) or 'none'}; the device comes first")
    if list(tiers) != sorted(set(tiers), key=lambda tier: tier.distance):
        raise PlanError(f"tiers {', '.join(tiers)}; accepted: each once, from near to far")
    names = {link.name for link in problem.links}
    ends: set[tuple[Tier | None, Tier | None]] = set()
    for link in problem.links:
        pair = link.source, link.destination
        if pair in ends:
            raise PlanError(
                f"link {link.name!r} is a second one from {pair[0]} to {pair[1]}; join both with the sum of their rates"
            )
        ends.add(pair)
        if missing := [end for end in pair if end is not None and end not in tiers]:
            raise PlanError(f"link {link.name!r} leads to {missing[0]}, which is no tier of the problem: {', '.join(tiers)}")
        if None in pair:
            if pair not in ((None, tiers[0]), (tiers[0], None)):
                raise PlanError(f"link {link.name!r} between ranks ends on {pair[0] or pair[1]}; accepted: the device")
        elif abs(tiers.index(pair[0]) - tiers.index(pair[1])) != 1:
            raise PlanError(f"link {link.name!r} leads from {pair[0]} to {pair[1]}, which are no neighbours")
        if unknown := [beside.link for beside in link.beside if beside.link not in names]:
            raise PlanError(f"link {link.name!r} has a rate beside {unknown[0]!r}, which is no link")
    for near, far in itertools.pairwise(tiers):
        for pair in ((near, far), (far, near)):
            if pair not in ends:
                raise PlanError(f"no link leads from {pair[0]} to {pair[1]}; the problem has both tiers")
    if problem.world_size > 1 and problem.units:
        for pair, what in (((None, tiers[0]), "gathers"), ((tiers[0], None), "reductions")):
            if pair not in ends:
                raise PlanError(f"no link for {what} between {problem.world_size} ranks")
    for unit in problem.units:
        if unit.home not in (None, *tiers):
            raise PlanError(f"unit {unit.name!r} lives on {unit.home}, which is no tier of the problem: {', '.join(tiers)}")
    for name in ("params", "grads", "states", "update"):
        for tier in getattr(problem.allowed, name):
            if tier not in tiers:
                raise PlanError(f"{name} are allowed on {tier}, which is no tier of the problem: {', '.join(tiers)}")


def _check_numbers(problem: ProblemParts) -> None:
    for number, region in enumerate(problem.regions):
        _at_least(0, f"region {number}", region, "seconds", "workspace_bytes", "micro_batch")
    for memory in problem.memories:
        _at_least(0, f"memory of {memory.tier}", memory, "reserved_bytes")
        _at_least(1, f"memory of {memory.tier}", memory, "sharers")
        if memory.bytes is not None and memory.bytes < 0:
            raise PlanError(f"the budget of {memory.tier} is {memory.bytes:,} bytes; accepted: 0 or more")
    for link in problem.links:
        _at_least(0, f"link {link.name!r}", link, "latency_seconds")
        _at_least(1, f"link {link.name!r}", link, "sharers")
        for rate in (link.bytes_per_second, *(row.bytes_per_second for row in link.beside)):
            if not (rate > 0 and math.isfinite(rate)):
                raise PlanError(f"link {link.name!r} moves {rate} bytes/s; accepted: more than 0")
        if slow := [row for row in link.beside if row.bytes_per_second > link.bytes_per_second]:
            raise PlanError(f"link {link.name!r} is faster beside {slow[0].link!r} than alone; measure both again")


def _at_least(least: float, where: str, row: Any, *names: str) -> None:
    for name in names:
        value = getattr(row, name)
        if not (value >= least and math.isfinite(value)):
            raise PlanError(f"{where} has {name} {value}; accepted: {least} or more")


def _check_regions(problem: ProblemParts, where: str, numbers: Iterable[int]) -> None:
    found = list(numbers)
    if wrong := [number for number in found if not 0 <= number < problem.count]:
        raise PlanError(f"{where}: region {wrong[0]} of {problem.count}")
    if found != sorted(set(found)):
        raise PlanError(f"{where}: regions {found}; accepted: each once, in order")


def _check_units(problem: ProblemParts) -> None:
    for unit in problem.units:
        where = f"unit {unit.name!r}"
        sizes = ("stored_bytes", "full_bytes", "wire_bytes", "gradient_bytes", "full_gradient_bytes", "reduced_bytes")
        _at_least(0, where, unit, *sizes)
        _check_regions(problem, f"uses of {where}", unit.uses)
        _check_regions(problem, f"gradients of {where}", unit.gradients)
        if not unit.uses and not unit.gradients:
            raise PlanError(f"{where} is used in no region; leave it out, and count its bytes as reserved")
        if problem.world_size > 1 and not unit.is_gathered:
            raise PlanError(f"{where} has no full bytes, on {problem.world_size} ranks; a gather makes a full copy")
        if unit.reduced_at_step and not unit.full_gradient_bytes:
            raise PlanError(f"{where} is reduced at the step, but has no full gradient: one rank reduces nothing")
        if unit.reduced_at_step and problem.allowed.grads != (problem.device,):
            raise PlanError(f"{where} is reduced at the step: until then its gradient can't leave the device, and may")
        if unit.gradients and not unit.trained:
            raise PlanError(f"{where} has gradients, but isn't trained")


def _check_saved(problem: ProblemParts) -> None:
    names = {value.name for value in problem.saved}
    choices = {"keep", "recompute", *problem.tiers[1:]}
    for value in problem.saved:
        where = f"saved value {value.name!r}"
        _at_least(0, where, value, "bytes")
        _check_regions(problem, f"uses of {where}", value.used_in)
        _check_regions(problem, f"{where}, made in", [value.made_in])
        _check_regions(problem, f"{where}, remade by", value.remade_by)
        if value.used_in and value.used_in[0] <= value.made_in:
            raise PlanError(f"{where} is used in region {value.used_in[0]}, and made in {value.made_in}")
        if value.remade_by and value.made_in not in value.remade_by:
            raise PlanError(
                f"{where} is made in region {value.made_in}, which is none of those that make it again: {value.remade_by}"
            )
        if unknown := [name for name in value.remade_from if name not in names]:
            raise PlanError(f"{where} is made again from {unknown[0]!r}, which is no saved value")
        if value.name in value.remade_from:
            raise PlanError(f"{where} is made again from itself")
        if wrong := [choice for choice in value.choices if choice not in choices]:
            raise PlanError(f"{where} has choice {wrong[0]!r}; accepted: {', '.join(sorted(choices))}")
        if value.choices == ("recompute",) and not value.remade_by:
            raise PlanError(f"{where} has to be recomputed, but no region makes it again")


def _check_pieces(problem: ProblemParts) -> None:
    for piece in problem.pieces:
        where = f"piece {piece.name!r}"
        sizes = ("state_bytes", "read_bytes", "written_bytes", "value_bytes", "value_read_bytes", "gradient_bytes")
        _at_least(0, where, piece, *sizes, "host_seconds", "device_seconds")
        if not piece.units:
            raise PlanError(f"{where} updates no unit")
        for name in piece.units:
            if name not in problem.unit:
                raise PlanError(f"{where} updates {name!r}, which is no unit")
            if not problem.unit[name].trained:
                raise PlanError(f"{where} updates {name!r}, which isn't trained")
        if max(piece.read_bytes, piece.written_bytes) > piece.state_bytes:
            raise PlanError(
                f"{where} reads {piece.read_bytes:,} and writes {piece.written_bytes:,} of {piece.state_bytes:,} bytes"
            )
        if piece.granularity not in GRANULARITIES:
            raise PlanError(f"{where} has granularity {piece.granularity!r}; accepted: {', '.join(GRANULARITIES)}")
        if piece.owner is not None and not 0 <= piece.owner < problem.world_size:
            raise PlanError(f"{where} is owned by rank {piece.owner} of {problem.world_size}")
    for name, pieces in problem.pieces_of.items():
        updated, shard = sum(p.value_bytes for p in pieces if len(p.units) == 1), problem.unit[name].stored_bytes
        if updated > shard:
            raise PlanError(f"the pieces of unit {name!r} write {updated:,} bytes of values; its shard has {shard:,}")
