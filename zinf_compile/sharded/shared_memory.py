"""Memory that a parameter shares with other tensors: partitioning gives it a home of its own, and others keep the old bytes.

A partitioned parameter is no view of anything. So parameters and buffers that overlap are refused before that, and tensors that
hold what a parameter had are found where they would be taken for it: by a later graph, or by an optimizer.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Mapping

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from zinf_compile.errors import UnsupportedModelError
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.units.unit import Unit

from .other_graphs import running_modules

_PLAIN = (torch.Tensor, nn.Parameter)


@dataclasses.dataclass(frozen=True, slots=True)
class _Range:
    """The bytes of a tensor in its storage, from the first to behind the last."""

    storage: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Left:
    """Memory that a parameter had before it was partitioned."""

    name: str
    trained: bool
    place: _Range
    storage: StorageWeakRef
    unit: weakref.ref[Unit]


_left: dict[int, list[_Left]] = process_wide({})
"""By the address of the storage, while others hold it."""


def check_shared(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
    """Raise `UnsupportedModelError` where one of `parameters`, which are about to be partitioned, shares memory with another one.

    Or with one of `buffers`, or of the tensors of modules whose methods are running, or with a parameter that was partitioned.
    Where neither is trained both keep their values, and may be apart.
    """
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for module in running_modules():
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            named.setdefault(id(tensor), (name, tensor))
    named |= {id(tensor): (name, tensor) for name, tensor in (*buffers.items(), *parameters.items())}
    wanted = {id(parameter) for parameter in parameters.values()}
    found = [(place, key) for key, (_, tensor) in named.items() if (place := _range_of(tensor)) is not None]
    last: tuple[_Range, int] | None = None
    for place, key in sorted(found, key=lambda row: (row[0].storage, row[0].start, row[0].end)):
        if last is not None and _overlap(last[0], place) and not wanted.isdisjoint((key, last[1])):
            (first, one), (second, other) = (named[k] for k in sorted((last[1], key), key=lambda k: k not in wanted))
            if one.requires_grad or other.requires_grad:
                raise UnsupportedModelError(
                    _refusal(first, second, both=isinstance(one, nn.Parameter) and isinstance(other, nn.Parameter))
                )
        if last is None or place.storage != last[0].storage or place.end > last[0].end:
            last = place, key
    forget_unused()
    for name, parameter in parameters.items():
        earlier, trained = former_owner(parameter)
        if earlier and (trained or parameter.requires_grad):
            raise UnsupportedModelError(
                f"parameter {name} is in the memory that parameter {earlier} had before it was partitioned, and they would "
                "differ from now on: assign one parameter to both places, which ties them, or give this one a copy "
                f"({name}.data = {name}.data.clone())"
            )


def leave(parameter: nn.Parameter, name: str, unit: Unit) -> None:
    """Note the memory of a parameter that is about to be partitioned as a unit."""
    place = _range_of(parameter)
    if place is not None:
        left = _Left(name, parameter.requires_grad, place, StorageWeakRef(parameter.untyped_storage()), weakref.ref(unit))
        _left.setdefault(place.storage, []).append(left)


def forget_unused() -> bool:
    """Forget memory that nobody holds any more, or whose parameter is gone; say whether there is any left."""
    for address, rows in list(_left.items()):
        kept = [row for row in rows if row.unit() is not None and not row.storage.expired()]
        if len(kept) < len(rows):
            _left.pop(address, None)
        if kept:
            _left[address] = kept
    return bool(_left)


def all_left() -> frozenset[int]:
    """Return the addresses of storages that parameters have left, some of which may be gone."""
    return frozenset(_left)


def former_owner(tensor: torch.Tensor) -> tuple[str, bool]:
    """Return the name of the parameter that had a tensor's memory, or part of it, before it was partitioned; empty: none.

    And whether it is trained.
    """
    place = _range_of(tensor) if _left else None
    rows = () if place is None else _left.get(place.storage, ())
    alive = (row for row in rows if place is not None and _overlap(row.place, place) and row.unit() is not None)
    return next(((row.name, row.trained) for row in alive), ("", False))


def _range_of(tensor: torch.Tensor) -> _Range | None:
    """Return where a tensor is; None for one that is partitioned, of a class of its own, or without memory."""
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided or not tensor.numel():
        return None
    storage, start = tensor.untyped_storage(), int(tensor.storage_offset())
    if not storage.nbytes():
        return None
    end = start + 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = format_of(tensor.dtype)
    return _Range(storage._cdata, size.bytes(start), size.bytes(end))


def _overlap(one: _Range, other: _Range) -> bool:
    return one.storage == other.storage and max(one.start, other.start) < min(one.end, other.end)


def _refusal(name: str, other: str, *, both: bool) -> str:
    way = (
        f"assign one parameter to both places ({other} = {name}), which ties them"
        if both
        else f"compute {other} from {name} in the forward"
    )
    return (
        f"parameter {name} shares memory with {'parameter' if both else 'buffer'} {other}; once partitioned it has memory of its "
        f"own, and they would differ from then on: {way}, or give it a copy ({other}.data = {other}.data.clone())"
    )
