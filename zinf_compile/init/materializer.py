"""The values of parameters on their way into shards: those of one module at a time are in memory."""

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

    What is put away may still be on its way to a drive while the next module's values are made: as long as all of it takes no
    more than `room` bytes. A value that is only drawn is none yet, where there are `deferred`: it is made when somebody reads it,
    or after all that draws it; to a drive it goes in pieces, of which each rank makes its own.
    """

    def __init__(self, ledger: Ledger, *, compare: bool, room: int = 0, deferred: DeferredFills | None = None) -> None:
        self._ledger = ledger
        self._room = room
        self._deferred = deferred
        self._compare = compare
        """Take checksums, by which ranks find out that they don't make the same model."""
        self._open: dict[int, _Open] = {}
        self._leaving: collections.deque[tuple[_Open, Pending]] = collections.deque()
        self._memory = GatherMemory()
        self._closed = False
        self.enlist: Callable[[nn.Parameter, str, int], None] | None = None
        """Makes a newborn of one more parameter, given its name and owner; None: all that will be are here."""

    def whole(self, newborn: MaterializingParameter, *, fills: bool = False) -> torch.Tensor:
        """Return the value in the parameter's shape; where a caller `fills` it, what it was before is not brought."""
        self._reject_if_closed(newborn)
        opened = self._open.get(id(newborn))
        if opened is None:
            self.close(but=newborn._zinf_materialization.owner)
            opened = self._bring(newborn, fills=fills)
        return opened.value()

    def filled(self, newborn: MaterializingParameter) -> None:
        """Note that a caller has filled what it asked for to `fill`."""
        self._take_fill(newborn)
        newborn._zinf_materialization.filled = True

    def undo(self, newborn: MaterializingParameter) -> None:
        """Forget what was brought for a caller to fill, which failed: the value is what it was before."""
        self._open.pop(id(newborn), None)

    def is_open(self, newborn: MaterializingParameter) -> bool:
        """Say whether a value is whole now."""
        return id(newborn) in self._open

    def may_defer(self, newborn: MaterializingParameter) -> bool:
        """Say whether what draws a value may be noted: nobody has it, and its elements lie in order."""
        large = is_large(newborn.numel(), newborn.dtype)
        return self._deferred is not None and large and newborn.is_contiguous() and id(newborn) not in self._open

    def defer(self, newborn: MaterializingParameter, func: Any, settings: Sequence[float]) -> bool:
        """Note which operator draws a value, for when it is needed; say whether that could be done."""
        self._reject_if_closed(newborn)
        return self._deferred is not None and self._deferred.note(newborn, func, settings)

    def adopt(self, newborn: MaterializingParameter, value: torch.Tensor) -> None:
        """Make a tensor's value the parameter's, whose metadata becomes the tensor's where it isn't settled."""
        birth = newborn._zinf_materialization
        if birth.settled and (value.shape != newborn.shape or value.dtype != newborn.dtype):
            raise UnsupportedModelError(
                f"parameter {birth.name}, {list(newborn.shape)} {newborn.dtype}, is being partitioned, and its initialiser makes "
                f"it {list(value.shape)} {value.dtype}: build the model in the shapes and types it is to have"
            )
        with torch.no_grad(), no_torch_function():
            if birth.settled:
                self.whole(newborn, fills=True).copy_(value)
            else:
                self.close(but=birth.owner)
                newborn.data = hollow_tensor(value)
                self._open[id(newborn)] = _Open(newborn, self._ledger, value)
        self.filled(newborn)

    def forget(self, newborn: MaterializingParameter) -> None:
        """Drop a value that is about to be replaced where it is kept."""
        self._open.pop(id(newborn), None)
        self._take_fill(newborn)

    def close(self, *, but: int | None = None) -> None:
        """Put away what is whole, but for the parameters of one module and what somebody has a view of."""
        for key, opened in list(self._open.items()):
            birth = opened.birth()  # None: it was replaced by another while it was here
            if birth is None or (birth.owner != but and self._put_away(birth, opened)):
                del self._open[key]

    def finish(self) -> None:
        """Put away everything, of what somebody still has a view of, what it is now; return when it is kept."""
        self.close()
        self._open.clear()
        for newborn in self._deferred.finish() if self._deferred is not None else ():
            self.whole(newborn)
            self.close()
        while self._leaving:
            self._wait_for_oldest()
        self._memory.clear()

    def drop(self) -> None:
        """Forget everything; from now on there are no values."""
        self._closed = True
        self._open.clear()
        if self._deferred is not None:
            self._deferred.drop()
        self._leaving.clear()
        self._memory.clear()

    def _bring(self, newborn: MaterializingParameter, *, fills: bool) -> _Open:
        birth, opened = newborn._zinf_materialization, _Open(newborn, self._ledger, self._take_memory(newborn.nbytes))
        flat = opened.flat
        fill = None if fills else self._take_fill(newborn)
        if fills:
            pass
        elif fill is not None:
            fill.whole(flat)
        elif birth.place is not None and birth.kept:
            birth.place.load(flat)
        elif _has_nan(flat.dtype):
            flat.fill_(math.nan)  # by which is seen what no initialiser touches
        else:
            flat.zero_()
        self._open[id(newborn)] = opened
        return opened

    def _take_fill(self, newborn: MaterializingParameter) -> Fill | None:
        return None if self._deferred is None else self._deferred.take(newborn)

    def _reject_if_closed(self, newborn: MaterializingParameter) -> None:
        if self._closed:
            raise UnsupportedModelError(
                f"parameter {newborn._zinf_materialization.name} was being partitioned when an error ended that: "
                "build the model anew"
            )

    def _put_away(self, birth: Materialization, opened: _Open) -> bool:
        """Keep a value; say whether nobody has a view of it."""
        alone = opened.is_alone()
        flat = opened.flat
        if birth.place is None:
            del flat
            return opened.let_go()
        if not birth.filled:
            birth.filled = not (_has_nan(flat.dtype) and bool(torch.isnan(flat).any()))
        if self._compare:
            birth.checksum = _checksum(flat)
        saving = birth.place.save(flat)
        birth.kept = True
        if alone:
            self._leaving.append((opened, saving))
            return True
        saving.wait()  # whoever has a view may change it at any time
        del flat
        return opened.let_go()

    def _take_memory(self, size: int) -> memoryview:
        """Return memory for so many bytes, once there is room for it or nothing else is on its way."""
        if self._deferred is None and not self._open and not self._leaving:  # else large values are rarely whole
            self._memory.reserve(self._room)
        while self._leaving:
            held = sum(opened.size for opened in [*self._open.values(), *(leaving for leaving, _ in self._leaving)])
            view = self._memory.lend_view(size, fresh=False) if held + size <= self._room else None
            if view is not None:
                return view
            self._wait_for_oldest()
        fresh = self._memory.lend_view(size)
        assert fresh is not None, "there is always new memory"
        return fresh

    def _wait_for_oldest(self) -> None:
        opened, saving = self._leaving.popleft()
        saving.wait()
        del opened  # counted until then


class _Open:
    """A value in memory."""

    def __init__(self, newborn: MaterializingParameter, ledger: Ledger, source: torch.Tensor | memoryview) -> None:
        """Take memory that is lent; or a value's, copied where this is not all there is in it."""
        self._newborn = weakref.ref(newborn)
        self._shape, self._stride, numel = tuple(newborn.shape), newborn.stride(), newborn.numel()
        self.size = size = numel * newborn.dtype.itemsize
        self._memory = source if isinstance(source, memoryview) else None
        if isinstance(source, memoryview):
            self.flat = self._view(source, newborn.dtype)
        elif source.untyped_storage().nbytes() == size:
            self.flat = source.as_strided((numel,), (1,))
        else:
            whole = self._view(private_memory(-(-max(1, size) // mmap.PAGESIZE) * mmap.PAGESIZE), newborn.dtype)
            self.flat = whole.copy_(source.as_strided((numel,), (1,)))
        ledger.add("staging", size)
        weakref.finalize(self, ledger.add, "staging", -size).atexit = False

    def birth(self) -> Materialization | None:
        """Return what is known of the parameter, while there is one."""
        newborn = self._newborn()
        return None if newborn is None else newborn._zinf_materialization

    def value(self) -> torch.Tensor:
        """Return the value in its shape."""
        return self.flat.as_strided(self._shape, self._stride)

    def is_alone(self) -> bool:
        """Say whether the memory is its own, and nobody else has a tensor on it."""
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
    return dtype.is_floating_point and dtype.itemsize > 1


def _checksum(flat: torch.Tensor) -> int:
    """Add up the bits: fast, and different for values that are."""
    data = flat.view(torch.uint8)
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    places = data[data.numel() // 8 * 8 :]
    return int(words.sum()) ^ int(places.sum(dtype=torch.int64)) << 1 if flat.numel() else 0
