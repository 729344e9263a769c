"""Whole values of parameters that are being materialized: those of one module at a time are in memory."""

from __future__ import annotations

import collections
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zinf_compile._torch import no_torch_function
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.memory.aligned_buffers import private_memory
from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.runtime.memory.ledger import Ledger
from zinf_compile.sharded.parameter import hollow_tensor

from .deferred_fills import DeferredFills
from .materializing import Materialization, MaterializingParameter
from .parallel_random import Fill, is_large


class Materializer:
    """Holds the values that are whole: those of one module, and those of others that somebody still has a view of.

    Values may still be written to a drive while the next module's are made, as long as all of them take no more than `room`
    bytes. With `deferred`, a value that is only drawn is not made yet: it is made when it is read, or after the
    last operator that draws it; to a drive it is written in pieces, of which each rank makes its own.
    """

    def __init__(self, ledger: Ledger, *, compare: bool, room: int = 0, deferred: DeferredFills | None = None) -> None:
        self._ledger = ledger
        self._room = room
        self._deferred = deferred
        self._compare = compare
        """Take checksums, by which ranks find out that they don't make the same model."""
        self._open: dict[int, _Open] = {}
        self._saving: collections.deque[tuple[_Open, Pending]] = collections.deque()
        self._memory = GatherMemory()
        self._closed = False
        self.enlist: Callable[[nn.Parameter, str, int], None] | None = None
        """Makes a parameter of one more parameter, given its name and owner; None: all that will be are here."""

    def whole(self, parameter: MaterializingParameter, *, fills: bool = False) -> torch.Tensor:
        """Return the value in the parameter's shape; where a caller `fills` it, its earlier value is not loaded."""
        self._reject_if_closed(parameter)
        opened = self._open.get(id(parameter))
        if opened is None:
            self.close(but=parameter._zinf_materialization.owner)
            opened = self._load(parameter, fills=fills)
        return opened.value()

    def filled(self, parameter: MaterializingParameter) -> None:
        """Note that a caller has filled what it asked for to `fill`."""
        self._take_fill(parameter)
        parameter._zinf_materialization.filled = True

    def undo(self, parameter: MaterializingParameter) -> None:
        """Drop memory that a caller failed to fill: the value is the earlier one."""
        self._open.pop(id(parameter), None)

    def is_open(self, parameter: MaterializingParameter) -> bool:
        """Return whether a value is whole now."""
        return id(parameter) in self._open

    def may_defer(self, parameter: MaterializingParameter) -> bool:
        """Return whether the fill of a value may be deferred: nobody has the value, and its elements lie in order."""
        large = is_large(parameter.numel(), parameter.dtype)
        return self._deferred is not None and large and parameter.is_contiguous() and id(parameter) not in self._open

    def defer(self, parameter: MaterializingParameter, func: Any, settings: Sequence[float]) -> bool:
        """Note which operator draws a value, for when it is needed; return whether that could be done."""
        self._reject_if_closed(parameter)
        return self._deferred is not None and self._deferred.note(parameter, func, settings)

    def adopt(self, parameter: MaterializingParameter, value: torch.Tensor) -> None:
        """Make a tensor's value the parameter's; its metadata, too, where the parameter's isn't settled."""
        materialization = parameter._zinf_materialization
        if materialization.settled and (value.shape != parameter.shape or value.dtype != parameter.dtype):
            raise UnsupportedModelError(
                f"parameter {materialization.name}, {list(parameter.shape)} {parameter.dtype}, is being partitioned, and its "
                f"initialiser makes it {list(value.shape)} {value.dtype}: build the model in the shapes and types it is to have"
            )
        with torch.no_grad(), no_torch_function():
            if materialization.settled:
                self.whole(parameter, fills=True).copy_(value)
            else:
                self.close(but=materialization.owner)
                parameter.data = hollow_tensor(value)
                self._open[id(parameter)] = _Open(parameter, self._ledger, value)
        self.filled(parameter)

    def forget(self, parameter: MaterializingParameter) -> None:
        """Drop a value that is about to be replaced where it is kept."""
        self._open.pop(id(parameter), None)
        self._take_fill(parameter)

    def close(self, *, but: int | None = None) -> None:
        """Save and drop whole values, except those of one module and those that somebody has a view of."""
        for key, opened in list(self._open.items()):
            materialization = opened.materialization()  # None: it was replaced by another while it was in memory
            if materialization is None or (materialization.owner != but and self._save(materialization, opened)):
                del self._open[key]

    def finish(self) -> None:
        """Save all values, those with a view elsewhere as they are now; return when they are saved."""
        self.close()
        self._open.clear()
        for parameter in self._deferred.finish() if self._deferred is not None else ():
            self.whole(parameter)
            self.close()
        while self._saving:
            self._wait_for_oldest()
        self._memory.clear()

    def drop(self) -> None:
        """Forget everything; from now on there are no values."""
        self._closed = True
        self._open.clear()
        if self._deferred is not None:
            self._deferred.drop()
        self._saving.clear()
        self._memory.clear()

    def _load(self, parameter: MaterializingParameter, *, fills: bool) -> _Open:
        materialization = parameter._zinf_materialization
        opened = _Open(parameter, self._ledger, self._take_memory(parameter.nbytes))
        flat = opened.flat
        fill = None if fills else self._take_fill(parameter)
        if fills:
            pass
        elif fill is not None:
            fill.whole(flat)
        elif materialization.place is not None and materialization.kept:
            materialization.place.load(flat)
        elif _has_nan(flat.dtype):
            flat.fill_(math.nan)  # marks what no initialiser touches
        else:
            flat.zero_()
        self._open[id(parameter)] = opened
        return opened

    def _take_fill(self, parameter: MaterializingParameter) -> Fill | None:
        return None if self._deferred is None else self._deferred.take(parameter)

    def _reject_if_closed(self, parameter: MaterializingParameter) -> None:
        if self._closed:
            raise UnsupportedModelError(
                f"parameter {parameter._zinf_materialization.name} was being partitioned when an error ended that: "
                "build the model anew"
            )

    def _save(self, materialization: Materialization, opened: _Open) -> bool:
        """Save a value; return whether nobody has a view of it."""
        alone = opened.is_alone()
        flat = opened.flat
        if materialization.place is None:
            del flat
            return opened.let_go()
        if not materialization.filled:
            materialization.filled = not (_has_nan(flat.dtype) and bool(torch.isnan(flat).any()))
        if self._compare:
            materialization.checksum = _checksum(flat)
        saving = materialization.place.save(flat)
        materialization.kept = True
        if alone:
            self._saving.append((opened, saving))
            return True
        saving.wait()  # whoever has a view may change it at any time
        del flat
        return opened.let_go()

    def _take_memory(self, size: int) -> memoryview:
        """Return memory for so many bytes, once there is room for it or no save is in flight."""
        if self._deferred is None and not self._open and not self._saving:  # else large values are rarely whole
            self._memory.reserve(self._room)
        while self._saving:
            held = sum(opened.size for opened in [*self._open.values(), *(saved for saved, _ in self._saving)])
            view = self._memory.lend_view(size, fresh=False) if held + size <= self._room else None
            if view is not None:
                return view
            self._wait_for_oldest()
        fresh = self._memory.lend_view(size)
        assert fresh is not None, "there is always new memory"
        return fresh

    def _wait_for_oldest(self) -> None:
        opened, saving = self._saving.popleft()
        saving.wait()
        del opened  # counted until then


class _Open:
    """A value in memory."""

    def __init__(self, parameter: MaterializingParameter, ledger: Ledger, source: torch.Tensor | memoryview) -> None:
        """Take memory that is lent; or a value's, copied where this is not all there is in it."""
        self._parameter = weakref.ref(parameter)
        self._shape, self._stride, numel = tuple(parameter.shape), parameter.stride(), parameter.numel()
        self.size = size = format_of(parameter.dtype).bytes(numel)
        self._memory = source if isinstance(source, memoryview) else None
        if isinstance(source, memoryview):
            self.flat = self._view(source, parameter.dtype)
        elif source.untyped_storage().nbytes() == size:
            self.flat = source.as_strided((numel,), (1,))
        else:
            whole = self._view(private_memory(-(-max(1, size) // mmap.PAGESIZE) * mmap.PAGESIZE), parameter.dtype)
            self.flat = whole.copy_(source.as_strided((numel,), (1,)))
        ledger.add("staging", size)
        weakref.finalize(self, ledger.add, "staging", -size).atexit = False

    def materialization(self) -> Materialization | None:
        """Return the parameter's record, while the parameter exists."""
        parameter = self._parameter()
        return None if parameter is None else parameter._zinf_materialization

    def value(self) -> torch.Tensor:
        """Return the value in its shape."""
        return self.flat.as_strided(self._shape, self._stride)

    def is_alone(self) -> bool:
        """Return whether the memory is its own, and nobody else has a tensor on it."""
        dtype = self.flat.dtype
        if self._memory is None or not self.let_go():
            return False
        self.flat = self._view(self._memory, dtype)
        return True

    def let_go(self) -> bool:
        """Drop the value, unless somebody holds a tensor on it: say whether it is gone."""
        storage, count, dtype = weakref.ref(self.flat.untyped_storage()), self.flat.numel(), self.flat.dtype
        del self.flat
        held = storage()
        if held is not None:
            self.flat = torch.empty(0, dtype=dtype).set_(held, 0, (count,), (1,))
        return held is None

    def _view(self, memory: memoryview | mmap.mmap, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.uint8)[: self.size].view(dtype)


def _has_nan(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and format_of(dtype).bytes(1) > 1


def _checksum(flat: torch.Tensor) -> int:
    """Add up the bits: fast, and different for values that are."""
    data = flat.view(torch.uint8)
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    places = data[data.numel() // 8 * 8 :]
    return int(words.sum()) ^ int(places.sum(dtype=torch.int64)) << 1 if flat.numel() else 0
