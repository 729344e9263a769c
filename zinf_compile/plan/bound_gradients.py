"""The rows of the linear programme that say how gradients leave the device: behind what makes them, in its memory until then.

Note: gradients under way
    What was made up to a moment, less what has left, is on the device then. What is left at the end of a step leaves in the next
    one, behind that step's `optimizer.step()` and before the update that reads it. Units whose full gradients are reduced once
    for several micro-batches leave once, and are whole on the device from the first to the last.
"""

from __future__ import annotations

from collections import defaultdict

from .bound_updates import UpdatesProgramme
from .problem_parts import Link, Unit


class GradientsProgramme(UpdatesProgramme):
    """A programme that has what gradients need."""

    def add_gradients(self) -> None:
        """Add the homes of all gradients, and their ways there."""
        problem, device = self.problem, self.problem.device
        self.made: list[dict[int, float]] = [defaultdict(float) for _ in range(self.intervals)]
        """Bytes that leave the device, by the interval that makes them."""
        self.stays_until: list[tuple[int, dict[int, float]]] = []
        for unit in problem.units:
            if not unit.gradients:
                continue
            if problem.world_size > 1 and unit.reduced_bytes:
                link = problem.link(device, None)
                self.least[link.name] += link.seconds(unit.reduced_bytes)
            held = dict.fromkeys(problem.tiers, float(unit.gradient_bytes))
            homes = self.home(f"grad {unit.name}", problem.allowed.grads, held)
            made = [self.of_region[region] for region in unit.gradients]
            for interval in set(made) - {0}:  # 0: behind the last moment
                if interval % 2:
                    self.taken[interval] += unit.full_gradient_bytes
            if first := min(set(made) - {0}, default=0):
                reduced = 1 if unit.full_gradient_bytes else 0  # a shard is there behind the region that makes the full one
                since = (first if first % 2 else first + 1) + reduced
                if since < self.intervals:
                    self.lasting_room[since][homes[device]] += unit.gradient_bytes
            for tier in problem.tiers[1:]:
                for link in problem.hops(device, tier)[1:]:
                    self.total[link.name][homes[tier]] += link.seconds(unit.gradient_bytes)
            if len(problem.tiers) > 1:
                self._add_leaving(unit, made, [homes[tier] for tier in problem.tiers[1:]])
        if any(self.made):
            self._add_left(problem.hops(device, problem.tiers[1])[0])

    def _add_leaving(self, unit: Unit, made: list[int], away: list[int]) -> None:
        """Add what leaves of one unit's gradient: its shares that live away."""
        link = self.problem.hops(self.problem.device, self.problem.tiers[1])[0]
        counted = min(unit.gradient_bytes, unit.full_gradient_bytes or unit.gradient_bytes)  # while either is there
        rest = link.seconds(unit.gradient_bytes) - counted * link.sharers / link.bytes_per_second
        once = self._once(unit, made, away) if unit.full_gradient_bytes and len(made) > 1 else None
        for number, interval in enumerate(made):
            # behind the region that makes a full one there is a shard, or the full one still
            at = (interval + 1) % self.intervals if unit.full_gradient_bytes and interval % 2 else interval
            shares = dict.fromkeys(away, 1.0) | ({once: -1.0} if once is not None and number < len(made) - 1 else {})
            for column, share in shares.items():
                self.made[at][column] += share * counted
                self.total[link.name][column] += share * rest
        until = min((self.window(piece) for piece in self.problem.pieces_of[unit.name]), default=self.intervals - 1)
        self.stays_until.append((until, dict.fromkeys(away, float(counted))))

    def _once(self, unit: Unit, made: list[int], away: list[int]) -> int:
        """Add the share that is reduced once for all micro-batches, and so is whole on the device between them."""
        once = self.variable(1.0)
        self.rows.add({once: 1.0, **dict.fromkeys(away, -1.0)}, 0.0)
        for interval in range(made[0] + 1, made[-1]):  # none, where the last one is behind the last moment
            self.used_room[interval][once] += unit.full_gradient_bytes
        return once

    def _add_left(self, link: Link) -> None:
        """Add what leaves in each interval, and what is left at its end."""
        moved = [self.variable() for _ in range(self.intervals)]
        left = [self.variable() for _ in range(self.intervals)]
        for interval, (leaving, here) in enumerate(zip(moved, left, strict=True)):
            before, made = left[interval - 1], self.made[interval]
            self.on_link[link.name][interval][leaving] += self.amount * link.sharers / link.bytes_per_second
            self.rows.add({before: self.amount, leaving: -self.amount, here: -self.amount, **made}, 0.0)
            self.used_room[interval][here] += self.amount
            if interval % 2 and made:
                self.rows.add({leaving: 1.0, before: -1.0}, 0.0)
        first = min(interval for interval, made in enumerate(self.made) if made)
        for end in sorted({until for until, _ in self.stays_until if until < first}):
            terms = {left[end]: self.amount}
            for until, shares in self.stays_until:
                if until > end:
                    terms |= {column: terms.get(column, 0.0) - size for column, size in shares.items()}
            self.rows.add(terms, 0.0)
