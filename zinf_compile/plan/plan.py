"""A plan: where everything of a step lives, and when it moves. A planner makes one from a `StepProblem`; passes act it out.

A plan is of one step and repeats. Its times are boundaries: boundary p lies before region p, and boundary 0 of a step is boundary
R of the step before, where R is the number of regions. A row may begin before its step (start < 0) or last beyond it (until > R).

Note: order at a boundary
    1. What is kept until p is released.
    2. Compute waits for the stores and reductions that are due at p: their memory is free from here on. Then those that start at
       p are issued, reductions first.
    3. Updates that start at p are issued; compute waits for those due at p, and for what both started and is due at p.
    4. Fetches that start at p are issued, then gathers.
    5. Compute waits for the gathers and fetches that are due at p.
    6. What is made again before p is made again.
    7. Region p runs.
    What is issued at one boundary is issued in the plan's order. A link takes, of the transfers whose sources are there, the one
    that was issued first; collectives keep to the order of issue.

So memory follows from boundaries alone: what starts at p and is due at q takes its memory from region p to region q - 1 whenever
it really runs. A wrong cost makes a step slower, and never takes more memory.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterator, Mapping

from zinf_compile.ir.tiers import Tier

from .as_json import read_json, write_json

VERSION = 1
"""Of the JSON."""


class Kind(enum.StrEnum):
    """What a transfer between tiers carries."""

    PARAM = "param"
    """A shard of a unit."""
    GRAD = "grad"
    """A shard of a unit's gradient."""
    SAVED = "saved"
    """A saved value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """A unit's shards of all ranks become its full unit on the device."""

    unit: str
    start: int
    due: int
    until: int
    """Regions due … until - 1 may read it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """A full gradient becomes a shard on each rank. It is kept whole from the first of `regions` until `due`."""

    unit: str
    regions: tuple[int, ...]
    """Whose full gradients are added up before; more than one keeps gradients whole over micro-batches."""
    start: int
    due: int


@dataclasses.dataclass(frozen=True, slots=True)
class Remake:
    """Saved values are dropped behind their last use before it, and made again by running regions again."""

    values: tuple[str, ...]
    regions: tuple[int, ...]
    before: int
    """They are there for regions `before` … to the last that uses them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """A copy of a shard or saved value on a nearer tier. One row is one hop.

    A shard that is fetched from a drive before its update is over is given the new values as they are made: no link moves them.
    """

    kind: Kind
    name: str
    source: Tier
    to: Tier
    start: int
    due: int
    until: int
    """It is there for regions due … until - 1, and for transfers issued at boundaries start … until - 1."""

    def serves(self, gather: Gather) -> bool:
        """Say whether it is there for a gather of its unit to take."""
        return self.start <= gather.start < self.until


@dataclasses.dataclass(frozen=True, slots=True)
class Store:
    """A gradient's shard or a saved value leaves for a farther tier. One row is one hop; its source is free from `due` on.

    A gradient on its way to memory may be due at R + 1: it leaves beside what the next step brings before its first region.

    A gradient that is stored again in a later micro-batch is added to the first one; on a drive that is read for it.
    """

    kind: Kind
    name: str
    source: Tier
    to: Tier
    start: int
    due: int


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """A piece of states is updated, with all its transfers: what it reads comes from its homes, what it writes goes there.

    On a device beside the host it runs between regions, at `due`; elsewhere beside them, as all that comes from a drive does
    where the device is the host.
    """

    piece: str
    on: Tier
    start: int
    """R or later: `optimizer.step()` is called behind the last region."""
    due: int
    """New values of its units are there from here on; R where nothing is deferred, up to 2 R."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Where each thing is while nothing moves it."""

    params: Mapping[str, Tier] = dataclasses.field(default_factory=dict)
    grads: Mapping[str, Tier] = dataclasses.field(default_factory=dict)
    """Of trained units, between backward and update."""
    states: Mapping[str, Tier] = dataclasses.field(default_factory=dict)
    """By piece."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What ranks decide together."""

    gathers: tuple[Gather, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    remakes: tuple[Remake, ...] = ()
    resident: tuple[str, ...] = ()
    """Units that are not trained, gathered before the first step and never released."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What each rank decides for itself."""

    homes: Homes = dataclasses.field(default_factory=Homes)
    fetches: tuple[Fetch, ...] = ()
    stores: tuple[Store, ...] = ()
    updates: tuple[Update, ...] = ()
    """In the order in which they are issued."""
    update_buffers: int = 0
    """Pieces in memory at once while updates run; 0 where nothing is moved for them."""
    updates_done: int = 0
    """The boundary at which compute waits for the last write of an update, and the buffers are free."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All decisions for one step of one rank."""

    shared: Shared = dataclasses.field(default_factory=Shared)
    local: Local = dataclasses.field(default_factory=Local)
    planner: str = ""

    def to_json(self) -> str:
        """Return the plan as text that `from_json` reads."""
        return write_json(self, kind="plan", version=VERSION)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan; raises `PlanError` naming the field that is wrong. `verify` says whether it fits a problem."""
        return read_json(cls, text, kind="plan", version=VERSION)

    def digest(self) -> str:
        """Return the digest of the shared part, which ranks compare."""
        return hashlib.sha256(write_json(self.shared, kind="plan", version=VERSION).encode()).hexdigest()

    def rows(self) -> Iterator[Gather | Reduction | Remake | Fetch | Store | Update]:
        """Yield the rows of all tables."""
        yield from self.shared.gathers
        yield from self.shared.reductions
        yield from self.shared.remakes
        yield from self.local.fetches
        yield from self.local.stores
        yield from self.local.updates

    def diff(self, other: Plan) -> list[str]:
        """Return a line for each home and row that only one of both has: "- " this one, "+ " the other one."""
        mine, theirs = list(map(str, self._lines())), list(map(str, other._lines()))
        return [
            *(f"- {line}" for line in mine if line not in set(theirs)),
            *(f"+ {line}" for line in theirs if line not in set(mine)),
        ]

    def _lines(self) -> Iterator[object]:
        homes = self.local.homes
        for what, places in (("param", homes.params), ("grad", homes.grads), ("states", homes.states)):
            yield from (f"{what} {name} lives on {tier}" for name, tier in places.items())
        yield from (f"unit {name} stays gathered" for name in self.shared.resident)
        yield from (f"{self.local.update_buffers} update buffers",) if self.local.update_buffers else ()
        yield from self.rows()
