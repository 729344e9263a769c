"""The gradient of a partitioned parameter: autograd sees the logical shape, each rank holds its reduced shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from zinf_compile._torch import no_override
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.transfer.move import Location, move, on_host, route_of
from zinf_compile.runtime.units.offloaded_gradient import OffloadedGradient
from zinf_compile.runtime.units.shard_values import OffloadedGradientShard, pieces_of
from zinf_compile.runtime.units.unit import Tile, Unit
from zinf_compile.runtime.units.whole import gather_whole
from zinf_compile.runtime.units.whole_gradient import WholeGradient

from .data_assignment import replaced

_DATA: Any = torch.Tensor.data


class ShardedGradient(torch.Tensor):
    """A gradient averaged over the ranks, of which this rank holds 1/N.

    Answers element-wise arithmetic, norms (over all ranks) and what autograd, `clip_grad_*`, `zero_grad` and `GradScaler` do
    with a gradient. Anything else needs the whole gradient: `full_tensor()`, on all ranks. On a single rank everything works.

    Its `dtype` is the parameter's, as autograd demands; the shard is kept in the unit's `reduce_dtype`, and sums, products and
    norms are taken of that. Views of it on a single rank share its memory, and have its type.
    """

    __slots__ = ("_pending", "_shard", "_unit")  # every step makes one for each parameter
    _unit: Unit
    _shard: torch.Tensor | OffloadedGradient
    """On the device, or, with what tier it has, elsewhere."""
    _pending: Pending
    _answer: ClassVar[Callable[..., Any]]
    """Performs an operator of which an argument is a gradient; set in `dispatch.py`."""

    @staticmethod
    def __new__(
        cls, unit: Unit, shard: torch.Tensor | OffloadedGradient, pending: Pending, dtype: torch.dtype | None = None
    ) -> ShardedGradient:
        return torch.Tensor._make_wrapper_subclass(
            cls, unit.shape, strides=unit.stride, dtype=dtype or unit.dtype, device=unit.device, requires_grad=False
        )

    def __init__(
        self, unit: Unit, shard: torch.Tensor | OffloadedGradient, pending: Pending, dtype: torch.dtype | None = None
    ) -> None:
        self._unit, self._shard, self._pending = unit, shard, pending

    @property
    def unit(self) -> Unit:
        """The partitioned parameter this is a gradient of."""
        return self._unit

    @property
    def kept_dtype(self) -> torch.dtype:
        """The type of the shard."""
        return self._shard.dtype

    @property
    def norm_dtype(self) -> torch.dtype:
        """The type of its norms: the more precise one, so that clipping rounds no more than the sum over the ranks did."""
        return torch.promote_types(self.dtype, self.kept_dtype)

    @property
    def offloaded(self) -> OffloadedGradient | None:
        """The shard, where it isn't on the device."""
        return self._shard if isinstance(self._shard, OffloadedGradient) else None

    @property
    def on_host(self) -> OffloadedGradient | None:
        """The shard, where it is in host memory beside a device with memory of its own."""
        offloaded = self.offloaded
        return offloaded if offloaded is not None and offloaded.backing.resident is not None else None

    def local(self) -> torch.Tensor:
        """Return this rank's shard, flat, with its padding; waits for the reduction. A copy, where the shard is `offloaded`.

        A deferred step that has still to apply it is waited for: the caller may change what it gets.
        """
        self._pending.wait()
        if not isinstance(self._shard, OffloadedGradient):
            self._unit.settle_update()
            return self._shard
        with self._unit.context.lanes.meter.waiting():
            return self._shard.load()

    def valid_parts(self) -> Iterator[torch.Tensor]:
        """Yield this rank's elements without padding; tile by tile on every tier, so that sums have the same bits on each."""
        unit = self._unit
        if not unit.tiles:
            yield self.local()[: unit.valid]
            return
        for tile in unit.tiles:
            yield self.part(tile)[: tile.valid]

    def parts_on_device(self) -> Iterator[torch.Tensor]:
        """Yield the same on the device, each to be read and dropped."""
        unit = self._unit
        if unit.device.type == "cpu" or self.offloaded is None:
            yield from self.valid_parts()
        elif self.on_host is None:
            yield from map(self._to_device, self.valid_parts())
        elif not unit.tiles:
            yield self._bring(0, unit.valid)()
        else:
            bringing = [(tile.span.place, tile.span.place + tile.valid) for tile in unit.tiles]
            arriving = self._bring(*bringing[0])
            for following in [*bringing[1:], None]:
                part, arriving = arriving(), arriving if following is None else self._bring(*following)
                yield part

    def part(self, tile: Tile) -> torch.Tensor:
        """Return this rank's elements of a tile's gradient, padding included; a copy, where they come from a drive."""
        offloaded = self.offloaded
        if offloaded is None:
            return tile.part(self.local())
        with tile.context.lanes.meter.waiting():
            return offloaded.load_part(tile)

    @property
    def whole(self) -> WholeGradient | None:
        """Where it is reduced at the step: the full gradient behind it, or what has become of that."""
        return self._pending if isinstance(self._pending, WholeGradient) else None

    def add_whole(self, other: ShardedGradient, *, in_place: bool) -> ShardedGradient | None:
        """Return the sum with another gradient of the unit, where neither needs to be reduced for that; else None."""
        mine, theirs = self.whole, other.whole
        if mine is None or theirs is None:
            return None
        if in_place:
            return self if mine.add(theirs) else None
        total = mine.plus(theirs)
        return None if total is None else ShardedGradient(self._unit, total.shard, total, self.dtype)

    def shares(self, shard: torch.Tensor) -> bool:
        """Say whether this is its shard."""
        return self._shard is shard

    def alias(self) -> ShardedGradient:
        """Return another tensor object with the same shard."""
        return ShardedGradient(self._unit, self._shard, self._pending, self.dtype)

    def prepare(self, *, early: bool = False) -> None:
        """Start to load the shard for the next `local`; with `early`, only if there is room beside the others.

        One in host memory beside a device with memory of its own is there: it is read where it is, or on the device.
        """
        if isinstance(self._shard, OffloadedGradient) and (self.on_host is None or self._unit.device.type == "cpu"):
            with self._unit.context.lanes.meter.waiting():
                self._shard.prepare(early=early)

    def state(self) -> tuple[object, int]:
        """Return what the shard is, by identity, and how often it was changed."""
        return (
            (self._shard, self._shard.version) if isinstance(self._shard, OffloadedGradient) else (s := self.local(), s._version)
        )

    def change(
        self,
        function: Callable[[torch.Tensor], object],
        *,
        elementwise: bool,
        of: Sequence[OffloadedGradient] = (),
        overwrites: bool = False,
    ) -> None:
        """Change the shard in place; where it is offloaded, and `elementwise` allows it, when it is next read.

        `of`: gradients in host memory of which the function makes the new values. `overwrites`: it doesn't read the old ones.
        """
        offloaded = self.offloaded
        if offloaded is None:
            shard = self.local()
            function(shard)
            torch.autograd.graph.increment_version(shard)  # which PyTorch doesn't below autograd; on padding, too
        elif overwrites and offloaded.spoiled:  # what is on the drive can't be read, perhaps
            self._overwrite(offloaded, function)
        elif elementwise:
            offloaded.change(function, of=of)
        else:
            shard = self.local()
            function(shard)
            offloaded.store(shard)

    def _overwrite(self, offloaded: OffloadedGradient, function: Callable[[torch.Tensor], object]) -> None:
        """Write new values to the shard's backing, piece by piece, in the place of incomplete ones."""
        values = OffloadedGradientShard(self._unit, offloaded)
        for start, end in pieces_of(self._unit):
            piece = self._unit.context.memory.staged_buffer(end - start, offloaded.dtype)
            function(piece)
            values.write(start, piece).wait()
        values.restored()
        offloaded.stored()

    def borrow(self) -> torch.Tensor:
        """Return the whole gradient on the device, on a single rank, to be read and dropped."""
        return self.start_borrowing()()

    def start_borrowing(self, *, early: bool = False) -> Callable[[], torch.Tensor]:
        """Start to bring what `borrow` returns; with `early`, only if there is room beside the others."""
        unit, memory = self._unit, self._unit.context.memory
        if self.on_host is None or unit.device.type == "cpu":  # which plays a device, too
            self.prepare(early=early)
            return self._borrow_loaded
        if early and not memory.has_room(memory.ledger, format_of(self.kept_dtype).bytes(unit.shard_numel)):
            return self.borrow
        bringing = self._bring(0, None)
        return lambda: unit.logical(bringing())

    def _borrow_loaded(self) -> torch.Tensor:
        shard = self.local()
        there = shard if shard.device == self._unit.device else self._to_device(shard)
        return self._unit.logical(there)

    def _to_device(self, part: torch.Tensor) -> torch.Tensor:
        """Return a copy of host memory on the device, which compute is ordered after, to be read and dropped."""
        context = self._unit.context
        context.memory.make_room(context.memory.ledger, part.nbytes)
        there = context.link.device_buffer(part.numel(), part.dtype)
        context.memory.ledger.track("staging", there)
        with context.lanes.meter.waiting():
            move(on_host(part), Location(there), by=route_of(context)).wait()
        return there

    def _bring(self, start: int, end: int | None) -> Callable[[], torch.Tensor]:
        """Start to copy elements of a shard in host memory to the device; return what orders compute after that."""
        offloaded = self.on_host
        assert offloaded is not None, "what is on the device stays there"
        self._pending.wait()
        with self._unit.context.lanes.meter.waiting():
            there, arriving = offloaded.copy_to_device(start, end)

        def arrive() -> torch.Tensor:
            with self._unit.context.lanes.meter.waiting():
                arriving.wait()
            return there

        return arrive

    def full_tensor(self) -> torch.Tensor:
        """Return the whole averaged gradient on every rank, in this gradient's `dtype`. A collective operation.

        Where it is reduced and kept in a more precise type, `grad.float().full_tensor()` is what was kept, not rounded.
        """
        context = self._unit.context
        own = self.local()
        shard = own.to(self._unit.device, self.dtype)
        if self._unit.shard_group.size == 1:
            return self._unit.logical(shard.clone() if shard is own else shard)
        self._unit.ranks.agree([f"gradient of {self._unit.name}, unit {self._unit.serial}"], what="gathering a gradient")
        full = context.full_buffer(self._unit.numel, shard.dtype, shard.device)
        gather_whole(self._unit, shard, full, f"gathering the gradient of {self._unit.name}")
        return self._unit.logical(full)

    def at_hand(self, needed_by: str) -> torch.Tensor:
        """Return the whole gradient in this gradient's `dtype`, on a single rank, where it is in memory.

        Elsewhere raises `PartitionedParameterError`, whose message begins with `needed_by`.
        """
        return self.kept_whole(needed_by).to(self.dtype)

    def kept_whole(self, needed_by: str) -> torch.Tensor:
        """Return the same as `at_hand`, in the type in which it is kept."""
        unit = self._unit
        if unit.shard_group.size > 1 or self.offloaded is not None:
            place = (
                f"each of {unit.shard_group.size} ranks holds a part"
                if self.offloaded is None
                else "the shards are off the device"
            )
            raise PartitionedParameterError(
                f"{needed_by} needs the whole gradient of {unit.name}, of which {place}; element-wise "
                "arithmetic, norms, max() or sum() of all elements, clipping and GradScaler work on it as it is; for "
                "anything else call grad.full_tensor() on all ranks"
            )
        return unit.logical(self.local())

    @property
    def data(self) -> torch.Tensor:
        """The gradient itself; assigned to, another one of its shape and type, of which it takes the values."""
        found: torch.Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is not self and not self._is_converted(value):
            other = replaced(self, value, f"the gradient of {self._unit.name}")
            assert isinstance(other, ShardedGradient), "a copy is partitioned alike"
            self._shard, self._pending = other._shard, other._pending

    def _is_converted(self, value: torch.Tensor) -> bool:
        """Say whether it is converted with its parameter inside `gathered`, which refuses what became of that at its end."""
        parameter = self._unit.parameter()
        return type(parameter) is torch.nn.Parameter and isinstance(value, torch.Tensor) and value.dtype != self.dtype

    def set_(self, *source: Any) -> torch.Tensor:
        if len(source) != 1 or not isinstance(source[0], torch.Tensor):
            raise PartitionedParameterError(
                f"the gradient of {self._unit.name} is partitioned; accepted by set_: a tensor of its shape, type and device"
            )
        self.data = source[0]
        return self

    def numpy(self, *, force: bool = False) -> Any:
        """Return the whole gradient as an array; on a single rank only."""
        return self.at_hand("numpy()").numpy(force=force)

    def tolist(self) -> Any:
        """Return the whole gradient as numbers; on a single rank only."""
        return self.at_hand("tolist()").tolist()

    def share_memory_(self) -> NoReturn:
        raise PartitionedParameterError(
            f"the gradient of {self._unit.name} is partitioned and can't be moved to shared memory: share grad.full_tensor()"
        )

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.at_hand("__dlpack__()").__dlpack__(**kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.at_hand("saving or pickling").clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        group = self._unit.shard_group
        if group.size == 1 and self.offloaded is None:
            return repr(self._unit.logical(self.local()))
        return (
            f"ShardedGradient({self._unit.name}, shape={list(self.shape)}, dtype={self.dtype}, rank {group.rank} of {group.size})"
        )

    __torch_function__ = no_override  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls._answer(func, types, args, kwargs or {})
