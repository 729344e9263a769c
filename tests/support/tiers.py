"""Train one small model with its states anywhere, and count what crosses each link."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any

import torch
from models import generator
from torch import nn
from torch.nn import functional as F
from training import BACKEND

from zinf_compile.ir.tiers import TIERS
from zinf_compile.optim.record import all_records
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.device.link import AcceleratorLink
from zinf_compile.runtime.device.simulated import SimulatedDevice
from zinf_compile.runtime.lanes.lanes import Lane
from zinf_compile.sharded.parameter import ShardedParameter

WORDS, WIDTH = 23, 9
MICRO_BATCHES = 2
STATES = 2
"""That AdamW keeps for each element; a master copy is one more."""
IN_MEMORY = 3
"""Chunks."""
WAYS = ("host to device", "device to host")
PAGE, GAP = 4096, 4096
"""Bytes that a drive moves as one; elements, of which a piece in a chunk takes whole multiples."""

Placement = tuple[str, str, str]
"""Tiers of parameters, gradients and optimizer states."""

PLACEMENTS: list[Placement] = list(itertools.product(TIERS, repeat=3))

PAIRS: list[Placement] = [(TIERS[i], TIERS[j], TIERS[-(i + j) % 3]) for i in range(3) for j in range(3)]
"""Nine of them, in which each two kinds of states meet on each two tiers; with all on one tier, three times."""

UNIFIED: list[Placement] = [placement for placement in PLACEMENTS if "host" not in placement]
"""Where the device is host memory."""

UNIFIED_PAIRS: list[Placement] = [placement for placement in UNIFIED if placement.count("nvme") in (1, 3)]
"""Four of these, in which each two kinds meet on each two tiers."""


class Sundry(nn.Module):
    """Tied and frozen parameters, one without dimensions; no size is a multiple of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up = nn.Linear(WIDTH, 19)
        self.down = nn.Linear(19, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embedding(words))
        x = x + self.down(torch.tanh(self.up(x))) * self.scale
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


FORWARD = ("embedding.weight", "frozen.weight", "frozen.bias", "up.weight", "up.bias", "down.weight", "down.bias")
"""What a forward of `Sundry` gathers, each once, beside `scale`, which is on the device wherever the others live."""

BACKWARD = ("embedding.weight", "frozen.weight", "up.weight", "down.weight")
"""What its backward gathers: for the gradients of what the layers were given."""

TRAINED = ("embedding.weight", "up.weight", "up.bias", "down.weight", "down.bias")


def sundry(dtype: torch.dtype = torch.float32) -> Sundry:
    """Return the same model every time."""
    torch.manual_seed(5)
    return Sundry().to(dtype)


def words(step: int, micro: int, rank: int = 0) -> torch.Tensor:
    """Return the tokens of a micro-batch."""
    return torch.randint(WORDS, (3, 8), generator=generator(MICRO_BATCHES * step + micro, rank))


def in_pieces(numel: int | None) -> dict[str, Any]:
    """Return the option that cuts shards into pieces of so many elements; none for None."""
    return {} if numel is None else {"compute_shape": {"piece_numel": numel}}


def options_for(placement: Placement, folder: object, *, piece: int | None = None, **others: Any) -> dict[str, Any]:
    """Return the options that put parameters, gradients and states there, in pieces of `piece` elements."""
    options = {**dict(zip(("params", "grads", "optimizer"), placement, strict=True)), **in_pieces(piece), **others}
    return {**options, "nvme": folder} if "nvme" in placement else options


def compiled(model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """Compile in place, by operators where the options don't say otherwise."""
    model.compile(backend=BACKEND, options=dict(options))
    return model


def context_of(model: nn.Module) -> Context:
    """Return what the ranks of a partitioned model share."""
    return next(p._zinf_unit.context for p in model.parameters() if isinstance(p, ShardedParameter))


def let_arrive(model: nn.Module) -> None:
    """Wait until all gradients are where they live: a step updates those first that are."""
    for parameter in model.parameters():
        if (found := getattr(parameter.grad, "offloaded", None)) is not None:
            found.wait_written()


def let_steps_end() -> None:
    """Return when nothing is left to do of any step; what failed is told to those who need it."""
    for _, record in all_records():
        if record.deferred is not None:
            record.deferred.pending.wait()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int = 0, *, arrived: bool = False
) -> list[float]:
    """Accumulate, clip, update, once all gradients have `arrived`; return the losses. Else waits for a device at its end only."""
    losses = []
    device = next(model.parameters()).device
    for micro in range(MICRO_BATCHES):
        loss = model(words(step, micro, rank).to(device)) / MICRO_BATCHES
        loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if arrived:
        let_arrive(model)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item() for loss in losses]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes over the links: read from drives, written to them, copied to the device and from it."""

    read: int = 0
    written: int = 0
    to_device: int = 0
    to_host: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __sub__(self, other: Traffic) -> Traffic:
        return self + other * -1

    def __mul__(self, times: int) -> Traffic:
        return Traffic(*(times * count for count in dataclasses.astuple(self)))


class Meter:
    """Says what crossed since it was last read; of one device and its ranks: a simulated one, or that of the model."""

    def __init__(self, device: SimulatedDevice | None) -> None:
        self._device = device
        self._before = Traffic()

    def read(self, model: nn.Module) -> Traffic:
        """Return it, once nothing moves any more. `model` is one that is partitioned."""
        let_steps_end()
        context, links = context_of(model), self._device.links if self._device is not None else {}
        if isinstance(context.link, AcceleratorLink):
            torch.accelerator.synchronize()
        lanes: list[Lane] = [link._lane for link in links.values()]
        if context.lanes._swap is not None:
            lanes.insert(0, context.lanes._swap)  # what it writes may have to be copied first
        for lane in lanes:
            lane.submit(lambda: None).wait()
        engine = context._engine
        while engine is not None and engine.in_flight:
            time.sleep(0.001)
        drive = (engine.bytes_read, engine.bytes_written) if engine is not None else (0, 0)
        counted = context.lanes.meter.report()
        copied = [link.bytes for link in links.values()] or [
            counted[way]["bytes"] for way in ("host to device", "device to host")
        ]
        now = Traffic(*drive, *map(int, copied))
        self._before, since = now, now - self._before
        return since


class Needed:
    """What training `Sundry` must move, from the sizes of its parameters alone; of one rank."""

    def __init__(
        self,
        placement: Placement,
        *,
        update: str | None,
        unified: bool,
        ranks: int,
        dtype: torch.dtype,
        piece: int,
        master: bool = False,
        reduced: torch.dtype | None = None,
        rank: int = 0,
        norms_on_device: bool = False,
    ) -> None:
        self.params, self.grads, self.states = placement
        self.unified, self.piece, self.ranks = unified, piece, ranks
        self.on_device = (update or ("device" if self.states == "device" else "host")) == "device"
        self.late = set(placement) == {"nvme"} if unified else not self.on_device
        """A step may still be under way when the next forward begins."""
        self.element = dtype.itemsize
        self.state = torch.float32.itemsize if master else self.element
        self.reduced = self.state if reduced is None else reduced.itemsize
        self.count = STATES + master
        self.norms_on_device = norms_on_device
        """As on an accelerator: gradients come from the host and from drives for their norms, and factors go to the host."""
        self.by_arrival = self.states == "nvme" and self.grads == "host" and ranks == 1
        """Chunks are updated in the order in which gradients arrive, which decides on those that are still in memory."""
        model = sundry()
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        self.valid = {name: min(-(-n // ranks), max(0, n - rank * -(-n // ranks))) for name, n in sizes.items()}
        self.numel = {name: -(-p.numel() // ranks) for name, p in model.named_parameters()}

    def partitioning(self) -> Traffic:
        """Each shard goes to its backing, frozen ones too."""
        return sum((self._leaves(name, self.params, self.element) for name in FORWARD), Traffic())

    def gathers(self) -> Traffic:
        """A forward and a backward bring what they use; on one rank the backward, of one region, finds all of it there."""
        again = () if self.ranks == 1 else BACKWARD
        return sum((self._comes(name, self.params) for name in FORWARD + again), Traffic())

    def gradients(self) -> Traffic:
        """A backward brings each gradient to its tier."""
        return sum((self._leaves(name, self.grads, self.reduced) for name in TRAINED), Traffic())

    def accumulating(self) -> Traffic:
        """A gradient is added to another: both are read and the sum is written; host memory is next to them."""
        if self.grads != "nvme":
            return Traffic()
        return Traffic(read=2 * self._on_drive(self.reduced), written=self._on_drive(self.reduced))

    def norm(self) -> Traffic:
        """The norm reads each gradient."""
        read = self._on_drive(self.reduced) if self.grads == "nvme" else 0
        if not self.norms_on_device or self.grads == "device":
            return Traffic(read=read)
        come = sum(self.valid[name] for name in TRAINED) * self.reduced
        factor = max(self.element, self.reduced)  # each is of its gradient's norm's type: the wider one
        return Traffic(read=read, to_device=come, to_host=factor * len(TRAINED))

    def step(self, *, first: bool) -> Traffic:
        """Values go and come back, gradients go, states go and come back: all that isn't where it is updated."""
        values = self._goes(self.params, self.element) + self._returns(self.params, self.element)
        gradients = self._goes(self.grads, self.reduced)
        if self.states == "nvme":
            states = self._streamed_states(first=first)
        else:
            states = self._returns(self.states, self.state) + (Traffic() if first else self._goes(self.states, self.state))
            states = states * self.count
        return values + gradients + states

    def micro_batches(self, count: int) -> Traffic:
        """The forwards and backwards before a step, and its clipping."""
        return (self.gathers() + self.gradients()) * count + self.accumulating() * (count - 1) + self.norm()

    def _leaves(self, name: str, tier: str, element: int) -> Traffic:
        size = self.numel[name] * element
        to_host = 0 if self.unified or tier == "device" else size
        return Traffic(written=self._extents(self.numel[name], element) if tier == "nvme" else 0, to_host=to_host)

    def _comes(self, name: str, tier: str) -> Traffic:
        leaving = self._leaves(name, tier, self.element)
        return Traffic(read=leaving.written, to_device=leaving.to_host)

    def _goes(self, tier: str, element: int) -> Traffic:
        size = 0 if self.unified else sum(self.numel[name] for name in TRAINED) * element
        return Traffic(
            read=self._on_drive(element) if tier == "nvme" else 0,
            to_device=size if self.on_device and tier != "device" else 0,
            to_host=size if not self.on_device and tier == "device" else 0,
        )

    def _returns(self, tier: str, element: int) -> Traffic:
        going = self._goes(tier, element)
        return Traffic(written=going.read, to_device=going.to_host, to_host=going.to_device)

    def _streamed_states(self, *, first: bool) -> Traffic:
        """States move by the chunk, gaps included; those of the last step's last chunks are still in memory.

        Where the next forward decides on the order, these come last again; the first ones are read while there is time, into
        all room but that of the last one.
        """
        sizes = [numel * self.state for numel in self._chunks()]
        read = 0
        if len(sizes) > IN_MEMORY:
            assert len(set(sizes)) == 1, "chunks are of one size: which of them stay in memory makes no difference"
            if self.late:
                read = IN_MEMORY - 1 if first else len(sizes)
            elif not first:
                read = len(sizes) - IN_MEMORY
        fresh = read * sizes[0]
        crossing = self.on_device and not self.unified
        moved = Traffic(read=fresh, written=sum(sizes), to_device=fresh if crossing else 0, to_host=sum(sizes) if crossing else 0)
        return moved * self.count

    def _chunks(self) -> list[int]:
        """Return the elements of each chunk, for pieces that are smaller than a gap or all as large as one."""
        made: list[int] = []
        for name in TRAINED:
            for start in range(0, self.numel[name], self.piece):
                size = min(self.piece, self.numel[name] - start)
                room = -(-size // GAP) * GAP
                if made and made[-1] + room <= self.piece:
                    made[-1] += room
                else:
                    made.append(room)
        return made

    def _on_drive(self, element: int) -> int:
        return sum(self._extents(self.numel[name], element) for name in TRAINED)

    def _extents(self, numel: int, element: int) -> int:
        """Return what a shard takes on a drive: each piece begins and ends at a page."""
        sizes = [min(self.piece, numel - start) * element for start in range(0, numel, self.piece)]
        return sum(-(-size // PAGE) * PAGE for size in sizes)
