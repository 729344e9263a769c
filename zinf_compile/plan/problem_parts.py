"""The rows that a step's problem consists of, as plain values. `StepProblem` in `problem` is all of them, checked."""

from __future__ import annotations

import dataclasses
import functools
import math

from zinf_compile.ir.pieces import Granularity
from zinf_compile.ir.tiers import Tier

KEEP, RECOMPUTE = "keep", "recompute"
"""What may become of a saved value beside being offloaded to a tier."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A stretch of compute that runs as one."""

    name: str
    seconds: float
    workspace_bytes: int = 0
    """Peak on the device of what exists in it alone: temporaries, and values that are neither units nor saved values."""
    structure: str = ""
    """Regions with the same one run the same code; blocks of a model are equal where theirs are."""
    graph: str = ""
    micro_batch: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A parameter, a tile of one, or several small ones that always move together: partitioned, gathered and released as one."""

    name: str
    stored_bytes: int
    """This rank's shard, in the format in which it is stored."""
    uses: tuple[int, ...]
    """Regions that read the full unit, or run while it stays for those that do."""
    full_bytes: int = 0
    """The gathered unit; 0 where compute reads the shard itself, as on one rank that stores what it computes with."""
    wire_bytes: int = 0
    """What this rank receives while the unit is gathered. 0 on one rank: then a gather is a cast."""
    trained: bool = False
    gradients: tuple[int, ...] = ()
    """Regions that complete a full gradient: one in each micro-batch, more where it is computed in parts."""
    gradient_bytes: int = 0
    """This rank's shard of the gradient, as it is accumulated."""
    full_gradient_bytes: int = 0
    """The gradient before its reduction; 0 on one rank: the region then accumulates into `gradient_bytes`."""
    reduced_bytes: int = 0
    """What this rank sends in a reduction."""
    reduced_at_step: bool = False
    """Its full gradients are added up on the device until the step, and reduced there, once."""
    structure: str = ""
    home: Tier | None = None
    """The tier on which the shard lives, where that is decided; None: on any that is allowed."""

    @property
    def is_gathered(self) -> bool:
        """Whether compute reads a copy that a gather makes."""
        return self.full_bytes > 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedValue:
    """A value that one region makes and later ones read, on the device: an activation."""

    name: str
    bytes: int
    made_in: int
    used_in: tuple[int, ...]
    """Regions of forward and backward that read it."""
    remade_by: tuple[int, ...] = ()
    """Regions that run again to make it again, in order; none: it cannot be."""
    remade_from: tuple[str, ...] = ()
    """Saved values that these regions read. They also read their units."""
    choices: tuple[str, ...] = ()
    """What may become of it: `keep`, `recompute`, or the tier that it is offloaded to; none given: whatever is possible."""
    structure: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece:
    """A piece of optimizer states: a range of a shard, ranges of several small shards, or a whole matrix."""

    name: str
    units: tuple[str, ...]
    """Whose values it updates. They have one home, and their gradients too."""
    state_bytes: int
    read_bytes: int
    """Of the states, by one update."""
    written_bytes: int
    """Of the states, by one update."""
    value_bytes: int
    """New values of the units' shards."""
    value_read_bytes: int = 0
    """Of the units' shards, by one update; 0 where the states have a master copy."""
    gradient_bytes: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    granularity: str = Granularity.RANGE.value
    owner: int | None = None
    """The rank that has it, where not each rank has its own."""
    deferrable: bool = True
    """Whether it may be updated beside the next step's regions."""
    structure: str = ""

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of one in memory while it is updated."""
        return self.state_bytes + self.gradient_bytes + self.value_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """The rate of a link while another one is busy."""

    link: str
    bytes_per_second: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two neighbouring tiers, or between ranks. Transfers run one after the other, in the order of issue.

    Links with the same `lane` share one order. A drive's reads and writes share its rate: each has the other in `beside`.
    """

    name: str
    source: Tier | None
    """None: the other ranks, as in a gather."""
    destination: Tier | None
    """None: the other ranks, as in a reduction."""
    bytes_per_second: float
    """While nothing else is busy, for all ranks of the node that share the link together."""
    latency_seconds: float = 0.0
    beside: tuple[Beside, ...] = ()
    """While another link is busy, again for all that share it; while several are, the least rate counts."""
    sharers: int = 1
    """Ranks of a node that use it at the same time: each gets an equal part."""
    lane: str = ""
    """Its own where empty."""

    def seconds(self, count: int) -> float:
        """Return the time of one transfer of `count` bytes while nothing else is busy; nothing takes no time."""
        return self.latency_seconds + count * self.sharers / self.bytes_per_second if count else 0.0

    @property
    def on_lane(self) -> str:
        """Return the name of its lane."""
        return self.lane or self.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A tier, and the bytes that a plan may use there."""

    tier: Tier
    bytes: int | None = None
    """The budget of all ranks that share it; None: no limit."""
    reserved_bytes: int = 0
    """Taken by what no plan decides: the user's own tensors, libraries' scratch, staging."""
    sharers: int = 1
    """Ranks of a node that share it: each gets an equal part."""

    @property
    def room(self) -> float:
        """Return the bytes for one rank's plan; may be negative."""
        return math.inf if self.bytes is None else self.bytes // self.sharers - self.reserved_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Tiers that the user allows for each kind of state; none given: all tiers that the problem has."""

    params: tuple[Tier, ...] = ()
    grads: tuple[Tier, ...] = ()
    states: tuple[Tier, ...] = ()
    update: tuple[Tier, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProblemParts:
    """The fields of a `StepProblem`, and the look-ups of its rows."""

    regions: tuple[Region, ...]
    memories: tuple[Memory, ...]
    """From the device to the farthest tier. Where host memory is the device there is no host beside it."""
    links: tuple[Link, ...] = ()
    units: tuple[Unit, ...] = ()
    saved: tuple[SavedValue, ...] = ()
    pieces: tuple[StatePiece, ...] = ()
    world_size: int = 1
    allowed: Allowed = dataclasses.field(default_factory=Allowed)
    name: str = ""

    @property
    def count(self) -> int:
        """Return the number of regions."""
        return len(self.regions)

    @functools.cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers from near to far."""
        return tuple(memory.tier for memory in self.memories)

    @functools.cached_property
    def device(self) -> Tier:
        """Return the tier of compute."""
        return self.memories[0].tier

    @functools.cached_property
    def host(self) -> Tier:
        """Return the tier beside the processor that runs host updates: the device's own where host memory is the device."""
        return next((tier for tier in reversed(self.tiers) if tier.in_memory), self.device)

    def param_tiers(self, name: str) -> tuple[Tier, ...]:
        """Return the tiers on which a unit's shard may live, from near to far."""
        home = self.unit[name].home
        return (self.allowed.params or self.tiers) if home is None else (home,)

    @functools.cached_property
    def unit(self) -> dict[str, Unit]:
        """Return the units by name."""
        return {unit.name: unit for unit in self.units}

    @functools.cached_property
    def value(self) -> dict[str, SavedValue]:
        """Return the saved values by name."""
        return {value.name: value for value in self.saved}

    @functools.cached_property
    def piece(self) -> dict[str, StatePiece]:
        """Return the pieces of states by name."""
        return {piece.name: piece for piece in self.pieces}

    @functools.cached_property
    def pieces_of(self) -> dict[str, tuple[StatePiece, ...]]:
        """Return for each unit the pieces that update it."""
        found: dict[str, list[StatePiece]] = {unit.name: [] for unit in self.units}
        for piece in self.pieces:
            for name in piece.units:
                found[name].append(piece)
        return {name: tuple(pieces) for name, pieces in found.items()}

    @functools.cached_property
    def updated_part(self) -> dict[tuple[str, str], float]:
        """Return by (unit, piece) the part of a shard that a piece updates; one of several units has equal parts of all."""
        found: dict[tuple[str, str], float] = {}
        for name, pieces in self.pieces_of.items():
            sizes = [piece.value_bytes / len(piece.units) for piece in pieces]
            total = sum(sizes)
            for piece, size in zip(pieces, sizes, strict=True):
                found[name, piece.name] = size / total if total else 0.0
        return found
