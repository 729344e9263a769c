"""The rows of the linear programme that say how pieces of states are updated: what passes to them, until when, and in what room.

Note: room for what passes
    States on a drive are read behind the step and before their units' first uses, and written behind that. From its read to its
    write a piece has a buffer. So what was read up to a moment, less what was written, is in memory then; and all gradients are
    still there when the first update begins, so that buffers fit beside them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict

from zinf_compile.ir.tiers import Tier

from .bound_programme import WINDOWS, Programme
from .problem_parts import Link, StatePiece

Due = tuple[int, int, int]
"""The interval until which something has passed, the share of it that does, its bytes."""


class UpdatesProgramme(Programme):
    """A programme that has what updates need."""

    def add_updates(self) -> None:
        """Add the homes of all pieces of states, and their updates."""
        problem, device = self.problem, self.problem.device
        self.read: dict[str, list[Due]] = defaultdict(list)
        self.written: dict[str, list[Due]] = defaultdict(list)
        self.passing: dict[tuple[str, str], list[Due]] = defaultdict(list)
        self.crossing: dict[str, list[Due]] = defaultdict(list)
        for piece, count in self._classes_of_pieces():
            held = dict.fromkeys(problem.tiers, float(count * piece.state_bytes))
            homes = self.home(f"states {piece.name}", problem.allowed.states, held)
            self.lasting_room[0][homes[device]] += count * piece.state_bytes
            self._add_update(piece, count, homes)
        at_once = any(self.window(piece) == 0 for piece in problem.pieces)
        links = {link.name: link for link in problem.links}
        for name, dues in self.crossing.items():
            self._over_intervals(links[name], dues, inward=True)
        reads = {name: self._over_intervals(links[name], dues, inward=True) for name, dues in self.read.items()}
        writes = {name: self._over_intervals(links[name], dues, inward=False) for name, dues in self.written.items()}
        for (inward, outward), dues in self.passing.items():
            self._add_passing(dues, reads[inward], writes[outward], at_once=at_once)

    def _classes_of_pieces(self) -> list[tuple[StatePiece, int]]:
        """Return pieces that nothing tells apart here, with their number: each has the share of all of them on a tier."""
        same: dict[StatePiece, list[StatePiece]] = defaultdict(list)
        for piece in self.problem.pieces:
            same[dataclasses.replace(piece, name="", structure="", owner=None)].append(piece)
        return [(pieces[0], len(pieces)) for pieces in same.values()]

    def _add_update(self, piece: StatePiece, count: int, states: dict[Tier, int]) -> None:
        """Add the updates of `count` pieces like this one."""
        problem, device = self.problem, self.problem.device
        allowed = problem.allowed.update
        on_device = self.variable(0.0 if allowed and device not in allowed else 1.0)
        self.again[on_device] += count * piece.device_seconds
        self.total.setdefault("update", defaultdict(float))
        self.on_link.setdefault("update", [])
        self.least["update"] += count * piece.host_seconds
        self.total["update"][on_device] -= count * piece.host_seconds
        unit = piece.units[0]
        params, grads = self.homes.get(f"param {unit}"), self.homes.get(f"grad {unit}")
        rows = [(states, piece.read_bytes, piece.written_bytes)]
        rows += [(params, piece.value_read_bytes, piece.value_bytes)] if params else []
        rows += [(grads, piece.gradient_bytes, 0)] if grads else []
        held = (piece.state_bytes, piece.value_bytes, piece.gradient_bytes)
        buffer = [(homes[tier], size) for (homes, _, _), size in zip(rows, held, strict=False) for tier in problem.tiers]
        far = {homes[tier] for homes, _, _ in rows for tier in problem.tiers if not tier.in_memory}
        if problem.host == device:  # a thread updates what comes from a drive
            self.rows.add({on_device: -1.0, **dict.fromkeys(far, -1.0)}, -1.0)
        elif allowed and problem.host not in allowed:
            self.rows.add({on_device: -1.0}, -1.0)
        self.buffers.append({column: float(size) for column, size in buffer if column in far})
        until = self.window(piece)
        if piece.host_seconds:
            seconds = count * piece.host_seconds
            self.updates_due.append((until, {on_device: -seconds}, seconds))
        for homes, read, written in rows:
            if problem.host != device:
                near = problem.tiers[1]
                self._across(problem.link(near, device), read, count, on_device, homes[device], until=until)
                self._across(problem.link(device, near), written, count, on_device, homes[device])
                self._across(problem.link(near, device), written, count, homes[device], on_device, until=until)
                self._across(problem.link(device, near), read, count, homes[device], on_device)
            for tier in (tier for tier in problem.tiers if not tier.in_memory):
                inward, outward = problem.hops(tier, problem.host), problem.hops(problem.host, tier)
                for links, size, table in ((inward, read, self.read), (outward, written, self.written)):
                    for link in links if size else ():
                        table[link.name].append((until, homes[tier], count * size))
                        self.total[link.name][homes[tier]] += count * link.latency_seconds
                if homes is states and 0 < read == written == piece.state_bytes:
                    self.passing[inward[-1].name, outward[0].name].append((until, homes[tier], count * read))

    def window(self, piece: StatePiece) -> int:
        """Return the last interval in which a piece's update can run: it begins with the step, at interval 0."""
        if not piece.deferrable:
            return 0
        first = min(min((*unit.uses, *unit.gradients)) for unit in (self.problem.unit[name] for name in piece.units))
        interval = self.of_region[first]
        return interval - 1 if interval % 2 else interval or self.intervals - 1

    def _across(self, link: Link, size: int, count: int, more: int, less: int, *, until: int | None = None) -> None:
        """So many times `size` bytes cross a link by at least the share `more - less`: behind the step and `until`, if given."""
        if not size:
            return
        crossing = self.variable()
        self.rows.add({more: 1.0, less: -1.0, crossing: -1.0}, 0.0)
        if until is None:
            self.total[link.name][crossing] += count * link.seconds(size)
            return
        self.total[link.name][crossing] += count * link.latency_seconds
        self.crossing[link.name].append((until, crossing, count * size))

    def _over_intervals(self, link: Link, dues: list[Due], *, inward: bool) -> list[int]:
        """Add what passes a link in each interval, in `amount`: what has a due until then, the rest at any time."""
        last = max(until for until, _, _ in dues) if inward else self.intervals - 1
        columns = [self.variable() for _ in range(last + 1)]
        for interval, column in enumerate(columns):
            self.on_link[link.name][interval][column] += self.amount * link.sharers / link.bytes_per_second
        self._pass_until(columns, dues if inward else [(last, column, count) for _, column, count in dues])
        return columns

    def _pass_until(self, columns: list[int], dues: list[Due]) -> None:
        ends = sorted({until for until, _, _ in dues})
        for end in {*ends[:: max(1, len(ends) // WINDOWS)], ends[-1]}:
            terms: dict[int, float] = dict.fromkeys(columns[: end + 1], -self.amount)
            for until, column, count in dues:
                if until <= end:
                    terms[column] = terms.get(column, 0.0) + count
            self.rows.add(terms, 0.0)

    def _add_passing(self, dues: list[Due], reads: list[int], writes: list[int], *, at_once: bool) -> None:
        """Add what is in memory between its read and its write, at the end of each interval."""
        device_too = self.problem.host == self.problem.device
        came = [self.variable() for _ in reads]
        left = [self.variable() for _ in writes]
        self._pass_until(came, dues)
        self._pass_until(left, [(len(left) - 1, column, count) for _, column, count in dues])
        for column, all_of_it in itertools.chain(zip(came, reads, strict=True), zip(left, writes, strict=True)):
            self.rows.add({column: 1.0, all_of_it: -1.0}, 0.0)
        buffers = self.variable()
        before: int | None = None
        for interval in range(self.intervals):
            here = self.variable()
            terms = {here: 1.0, left[interval]: 1.0}
            if before is not None:
                terms[before] = -1.0
            if interval < len(came):
                terms[came[interval]] = -1.0
            self.rows.add(terms, 0.0)
            self.rows.add({column: -value for column, value in terms.items()}, 0.0)
            self.rows.add({here: 1.0, buffers: -1.0}, 0.0)
            if device_too:
                self.used_room[interval][here] += self.amount
            before = here
        if at_once:
            self.buffers.append({buffers: self.amount})
