"""A partitioned parameter on one rank: its shard, its tiles, and its whole value."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zinf_compile._torch import storage_owners
from zinf_compile.ir.tiers import ON_DEVICE, Placement
from zinf_compile.ir.tiling import Box, borders_of, box_text, tile_shape, tile_stride
from zinf_compile.runtime.comm.shard_ranges import shard_numel
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.memory.own_storage import with_own_storage
from zinf_compile.runtime.transfer.move import Location, crosses, move, on_host, route_of

from .backing import NvmeBacking, ShardBacking
from .own_shards import OWN, OwnShards
from .placed import Placed
from .saving import ShardsSave
from .shard_layout import DenseLayout, cut_spans
from .updatable import Updatable

if TYPE_CHECKING:
    from zinf_compile.ir.checkpoint_folder import CheckpointFolder
    from zinf_compile.runtime.comm.collectives import Collectives
    from zinf_compile.runtime.comm.ranks import Ranks
    from zinf_compile.runtime.comm.shard_group import ShardGroup
    from zinf_compile.runtime.comm.steps_done import StepDone
    from zinf_compile.runtime.context import Context

    from .nvme_gradient_pool import NvmeGradientPool
    from .nvme_shards import NvmeShards
    from .pending_updates import Updates


class Unit(DenseLayout, Placed, Updatable):
    """One partitioned parameter on this rank. Its flat order is that of the parameter's memory.

    Its shard is a tensor on its device, or has a `backing` elsewhere. A rank's shard of a large one is its shards of all tiles,
    one after the other, so that each tile comes from all ranks.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        shard: torch.Tensor | None,
        *,
        name: str,
        context: Context,
        placement: Placement = ON_DEVICE,
        backing: ShardBacking | None = None,
        tiles: Sequence[Box] = (),
        serial: int | None = None,
        shard_group: ShardGroup | None = None,
    ) -> None:
        super().__init__(parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
        assert (shard is None) == (backing is not None), "a shard is in one place"
        self.name = name
        self.context = context
        self._shard_group: ShardGroup | None = shard_group or context.ranks.shard_group
        self.placement = placement
        self.parameter = weakref.ref(parameter)
        context.enlist(self)
        self.serial = next(context.serials) if serial is None else serial
        """The number of the parameter among those of these ranks; equal on all, since all partition in the same order."""
        self.family = self.serial
        """The serial of the first parameter that was partitioned together with this one."""
        self.cut(tiles)
        self.smaller_tile: tuple[int, int] | None = None
        """Bytes of a tile by default, and of those that a graph has cut it into, where it didn't fit with the former."""
        self._shard = shard
        self.backing = backing
        """The backing of the shard; None: it is on the device, in `shard`."""
        self.gradient_pool: tuple[NvmeGradientPool, int] | None = None
        """The pool of gradients whose tier is a drive, and the unit's number in it."""
        self.chosen: dict[str, bool] = {}
        """Decisions of all ranks about its transfers, see `choices`; graphs follow them."""
        self.updates: Updates[Unit] | None = None
        """The deferred step that may still update the shard."""
        self.saving: ShardsSave | None = None
        """The save in the background that has still to write some of the shard, perhaps."""
        self.checkpoint: CheckpointFolder | None = None
        """The folder that was announced for checkpoints of its model."""
        self.steps_digest = 0
        """Sum of the digests of its steps, see `steps_done`."""
        self.last_step: StepDone | None = None
        self._whole: torch.Tensor | None = None
        self._replaced = False  # by memory that others have given

    def cut(self, boxes: Sequence[Box]) -> None:
        """Have tiles with these boxes; none where it is gathered as a whole."""
        self.boxes = tuple(boxes)
        self.spans = cut_spans(self.numel, borders_of(self.boxes)[1:-1], self.shard_group.size)
        self.tiles = [Tile(self, number) for number in range(len(self.boxes))]
        for cached in ("layout", "gradient_bytes", "full_copy_numel"):
            self.__dict__.pop(cached, None)

    @property
    def shard_group(self) -> ShardGroup:
        """The ranks over which it is cut, and those with copies."""
        return self._shard_group or self.context.ranks.shard_group  # emptied: the closed context refuses

    @property
    def ranks(self) -> Ranks:
        """Comparisons and exchanges among those ranks."""
        return self.context.ranks.of(self.shard_group)

    @property
    def gathers(self) -> Collectives:
        """Collectives of those ranks, for the lane of gathers."""
        return self.context.collectives(self.shard_group)[0]

    @property
    def shard(self) -> torch.Tensor:
        """This rank's elements, flat, then zeros up to `shard_numel`; only where they are on the device."""
        assert self._shard is not None, "`load` loads the shard"
        return self._shard

    @property
    def shard_numel(self) -> int:
        """Elements of the shard, padding included."""
        return shard_numel(self.numel, self.shard_group.size)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The borders, in the shard, between tiles."""
        return tuple(span.place for span in self.spans[1:])

    @property
    def resident(self) -> torch.Tensor | None:
        """The shard, where its backing is host memory."""
        return None if self.backing is None else self.backing.resident

    def split(self, shard: torch.Tensor, full: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Cut a shard, and a flat full tensor, into the parts of tiles, which a collective operation moves."""
        shards = [shard[s.place : s.place + s.shard_numel] for s in self.spans]
        return shards, [full[s.start : s.end] for s in self.spans]

    @property
    def at_hand(self) -> bool:
        """Whether this process has the whole value in memory of the device."""
        return self.backing is None and self.shard_group.size == 1

    def changing(self, start: int = 0, end: int | None = None) -> None:
        """Call before elements [start, end) of the shard change, in memory or on a drive, or are handed out to be changed."""
        self.context.full_copies.drop(self)
        if self.saving is not None:
            self.saving.before_change(self, start, self.shard_numel if end is None else end)

    @property
    def on_drive(self) -> bool:
        """Whether the shard is on a drive."""
        return self.backing is not None and not self.backing.tier.in_memory

    @property
    def aliased(self) -> bool:
        """Whether others have tensors of the shard's memory, which they may change without a call of `changing`."""
        whole = self._whole
        return self._replaced or (whole is not None and storage_owners(whole) > 1 + (whole._base is not None))

    def read(self, into: torch.Tensor, start: int = 0) -> Pending:
        """Start to fill host memory with the shard after its last step; from element `start` on, where a tile begins."""
        self.check_whole()
        assert isinstance(self.backing, NvmeBacking), "what is in memory needs no reading"
        return self.backing.read(into, start) if self.updates is None else self.updates.read(self, into, start)

    def location(self) -> Location:
        """Return the location of the shard as it is after its last step, for `transfer.move`."""
        if self.backing is None or self.resident is not None:
            self.wait_updated()
        if self.backing is None:
            return Location(self.shard)
        return Location(read=self.read, among=self.among()) if self.resident is None else on_host(self.resident)

    def among(self, start: int = 0) -> tuple[NvmeShards, int, int] | None:
        """See `Location.among`, for what begins at element `start`; None while a step may still have to update the shard."""
        self.check_whole()
        assert isinstance(self.backing, NvmeBacking), "it is on a drive"
        return self.backing.among(start) if self.updated() is None else None

    def load(self) -> torch.Tensor:
        """Return the shard on the device: itself, or a copy where its backing is elsewhere."""
        self.check_whole()
        if self.backing is None or self.resident is not None:
            self.wait_updated()
        if self.backing is None:
            return self.shard
        link, by = self.context.link, route_of(self.context)
        host = self.resident
        if host is None:
            host = self.read_to_host()
        if not link.topology.host_apart:
            return host
        shard = link.device_buffer(self.shard_numel, self.dtype, lasting=True)
        move(on_host(host), Location(shard), by=by).wait()
        return shard

    def blank(self) -> torch.Tensor:
        """Return memory of the device to be filled with the shard, and then kept by `save`."""
        self.begin_replacing()
        self.changing()
        if self.backing is None:
            return self.shard
        return self.context.link.device_buffer(self.shard_numel, self.dtype, lasting=True)

    def save(self, shard: torch.Tensor) -> None:
        """Save the memory that `blank` returned as the shard."""
        self.start_saving(shard).wait()

    def start_saving(self, shard: torch.Tensor, *, from_host: bool = False) -> Pending:
        """Start to save the memory that `blank` returned, or a shard in host memory; it may not change meanwhile."""
        self.begin_replacing()
        self.changing()
        self.restored()  # not before: a step that fails meanwhile marks the values incomplete
        link, by, source = self.context.link, route_of(self.context), Location(shard, on_device=not from_host)
        if self.backing is None:
            return move(source, Location(self.shard), by=by) if from_host else Done()
        place = self.backing.location(0, self.shard_numel)
        if place.tensor is None and link.topology.host_apart and not from_host:
            host = on_host(link.host_buffer(self.shard_numel, self.dtype))
            move(source, host, by=by).wait()
            source = host
        moving = move(source, place, by=by)
        if crosses(source, place, link):
            moving.wait()
        return moving

    @property
    def valid(self) -> int:
        """Elements of the shard that are not padding."""
        return sum(end - start for start, end in self.held)

    @property
    def held(self) -> list[tuple[int, int]]:
        """The ranges [start, end) of the flat parameter whose elements this rank has, one for each tile."""
        return [span.part_of(self.shard_group.rank) for span in self.spans]

    @functools.cached_property
    def layout(self) -> dict[str, Any]:
        """The elements that this rank has, in the order of dimensions in memory, and the numbers that they follow from."""
        dims = [dim for dim, size in enumerate(self.shape) if size > 1]
        return {
            "rank": self.shard_group.rank,
            "ranks": self.shard_group.size,
            "tile": self.placement.tile,
            "order": tuple(sorted(dims, key=lambda dim: -self.stride[dim])),
            "elements": tuple(self.held),
            OWN: OwnShards.of(self.shard_group.rank),
        }

    def whole(self) -> torch.Tensor:
        """Return the parameter's value, on a single rank, sharing memory with the shard but with a storage of its own.

        Its own storage, because who saves or compares tensors by storage must not see the whole arena. Waits for its update.
        """
        self.wait_updated()
        return self.whole_memory()

    def whole_memory(self) -> torch.Tensor:
        """Return the same, to be read after what `updated` returns."""
        shard = self.shard
        if self._whole is None or self._whole.data_ptr() != shard.data_ptr():  # moved: to memory shared with a process
            assert self.at_hand, "only a single rank whose shard is on the device has the whole parameter at hand"
            with torch.inference_mode(False), torch.no_grad():  # it outlives the mode in which it is first asked for
                own = with_own_storage(shard) if self.numel else torch.empty(0, dtype=self.dtype, device=self.device)
                self._whole = self.logical(own)
        return self._whole

    def replace(self, shard: torch.Tensor) -> None:
        """Let other memory be the shard; on a single rank, where the shard is on the device."""
        assert self.at_hand, "only what is at hand can be replaced as a whole"
        self.begin_replacing()
        self.changing()
        self.context.memory.ledger.track("params", shard)
        self._shard, self._whole, self._replaced = shard, None, True

    def empty(self) -> None:
        """Drop the shard, wherever it is: its context is closed."""
        self._shard = self._whole = self.backing = self.gradient_pool = self.updates = self._shard_group = None
        for tile in self.tiles:
            tile.forget_whole()

    def local_part(self, full: torch.Tensor) -> torch.Tensor:
        """Cut this rank's shard, padded with zeros, out of a full tensor of the parameter's shape (any data type)."""
        flat = self.flat(full.detach())
        part = torch.cat([flat[start:end] for start, end in self.held])
        padding = part.new_zeros(self.shard_numel - part.numel())
        return torch.cat([part, padding]) if padding.numel() else part


class Tile(DenseLayout):
    """A part of a unit that a schedule moves by itself. Its shard is part of the unit's, in the same backing."""

    def __init__(self, unit: Unit, number: int) -> None:
        box = unit.boxes[number]
        super().__init__(tile_shape(box), tile_stride(box, unit.stride), unit.dtype, unit.device)
        self._unit = weakref.ref(unit)
        self._text = box_text(box, unit.shape)
        self.span = unit.spans[number]
        self.context: Context = unit.context
        self._whole: torch.Tensor | None = None

    @property
    def unit(self) -> Unit:
        """The unit it is a part of."""
        unit = self._unit()
        assert unit is not None, "a tile is used by who has its unit"
        return unit

    @property
    def name(self) -> str:
        """The parameter's name and the tile's box."""
        return self.unit.name + self._text

    @property
    def shard_group(self) -> ShardGroup:
        """See `Unit.shard_group`."""
        return self.unit.shard_group

    @property
    def placement(self) -> Placement:
        """See `Unit.placement`."""
        return self.unit.placement

    @property
    def reduce_dtype(self) -> torch.dtype:
        """See `Unit.reduce_dtype`."""
        return self.unit.reduce_dtype

    @property
    def backing(self) -> ShardBacking | None:
        """See `Unit.backing`; the backing of all tiles."""
        return self.unit.backing

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's part, padding included."""
        return self.span.shard_numel

    @property
    def valid(self) -> int:
        """Elements of this rank's part that are not padding."""
        start, end = self.span.part_of(self.shard_group.rank)
        return end - start

    def split(self, shard: torch.Tensor, full: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """See `Unit.split`; a tile moves as one."""
        return [shard], [full]

    def part(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the tile's part of a shard of the unit."""
        return shard[self.span.place : self.span.place + self.shard_numel]

    @property
    def shard(self) -> torch.Tensor:
        """This rank's elements; only where they are on the device."""
        return self.part(self.unit.shard)

    @property
    def resident(self) -> torch.Tensor | None:
        """The same, where their backing is host memory."""
        shard = self.unit.resident
        return None if shard is None else self.part(shard)

    def updated(self) -> Pending | None:
        """See `Unit.updated`."""
        return self.unit.updated(self.span.place, self.span.place + self.shard_numel)

    def begin_updated(self, begin: Callable[[], Pending]) -> Pending:
        """See `Unit.begin_updated`."""
        return self.unit.begin_updated(begin, self.span.place, self.span.place + self.shard_numel)

    def read(self, into: torch.Tensor) -> Pending:
        """See `Unit.read`."""
        return self.unit.read(into, self.span.place)

    def location(self) -> Location:
        """See `Unit.location`."""
        if self.backing is None:
            return Location(self.shard)
        if self.resident is not None:
            return on_host(self.resident)
        return Location(read=self.read, among=self.unit.among(self.span.place))

    def forget_whole(self) -> None:
        """Drop the tensor that `whole` returned."""
        self._whole = None

    def whole_memory(self) -> torch.Tensor:
        """Return the tile's values, on a single rank, as `Unit.whole_memory` does."""
        shard = self.shard
        if self._whole is None or self._whole.data_ptr() != shard.data_ptr():  # moved, as a unit's may be
            self._whole = self.logical(with_own_storage(shard))
        return self._whole
