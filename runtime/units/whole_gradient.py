"""Full gradients that a rank keeps until the step: those of further backwards are added to them, and then they are reduced, once.

Note: order
    The first that is read starts the reduction of all parameters' gradients, in the order of these and in transfers of a bucket
    each. One that no parameter has, of `torch.autograd.grad` or of an earlier step, is reduced where it is read itself: what some
    rank still refers to changes nothing for the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from zinf_compile._torch import no_torch_function
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.lanes.link_meter import moving
from zinf_compile.runtime.lanes.stream_lane import StreamLane

if TYPE_CHECKING:
    from zinf_compile.runtime.context import Context

    from .unit import Unit

GROUP_BYTES = 32 << 20
"""Of full gradients that are sent together, as by the default of option `bucket`. No sum depends on it."""


class WholeGradient:
    """The full gradient of a unit on this rank, and the shard that it becomes. A `Pending`: who waits for it has it reduced."""

    __slots__ = ("__weakref__", "_full", "_is_zero", "_reduction", "shard", "unit")

    def __init__(self, unit: Unit, full: torch.Tensor, shard: torch.Tensor) -> None:
        self.unit = unit
        self.shard = shard
        """Of the reduced gradient, once it was waited for."""
        self._full: torch.Tensor | None = full
        self._reduction: tuple[Pending, str] | None = None
        self._is_zero = False

    @property
    def full(self) -> torch.Tensor | None:
        """The full gradient, flat; None from the beginning of its reduction on."""
        return self._full

    def add(self, other: WholeGradient) -> bool:
        """Add another full gradient of the unit, which stays as it is; return False where one of them is reduced already."""
        if (more := other._full) is None or (self._full is None and not self._is_zero):
            return False
        if self._full is not None:
            self._full += more
            return True
        self._full, self._reduction, self._is_zero = more.clone(), None, False
        ledger = self.unit.context.memory.ledger
        ledger.track("grads", self._full)
        self.unit.context.whole_gradients.add(self)
        return True

    def plus(self, other: WholeGradient) -> WholeGradient | None:
        """Return the sum with another full gradient of the unit; None where one of them is reduced already."""
        if self._full is None or other._full is None:
            return None
        return keep_whole(self.unit, self._full + other._full)

    def drop(self) -> None:
        """Have no full gradient any more: the shard is about to be overwritten."""
        self._full = None

    def is_zero(self) -> None:
        """Note that the shard is zero: what is added next may stay whole. Nobody may have read it since."""
        self._is_zero = self._full is None

    def begin(self, reduction: Pending, what: str) -> None:
        """Drop the full gradient, which `reduction` is to bring into the shard."""
        self._full, self._reduction = None, (reduction, what)

    def wait(self) -> None:
        """See `Pending.wait`: have it reduced, and with it all others that are there."""
        if self._full is not None:
            _reduce_with(self)
        self._is_zero = False  # the caller may change it
        if self._reduction is not None:
            self.unit.context.finish(*self._reduction)


def keep_whole(unit: Unit, full: torch.Tensor) -> WholeGradient:
    """Keep a full gradient, flat and in memory of its own, until its shard is read."""
    made = WholeGradient(unit, full, full.new_empty(unit.shard_numel))
    ledger = unit.context.memory.ledger
    ledger.track("grads", full)
    ledger.track("grads", made.shard)
    unit.context.whole_gradients.add(made)
    return made


def _reduce_with(first: WholeGradient) -> None:
    """Start to reduce one, with all others that are gradients of parameters, if it is one. A collective operation."""
    context = first.unit.context
    kept = context.whole_gradients
    chosen = sorted(filter(_is_current, kept), key=lambda each: each.unit.serial) if _is_current(first) else [first]
    for _, alike in itertools.groupby(chosen, key=lambda each: each.unit.shard_group.partition):
        members = list(alike)
        lines = [f"gradient of {each.unit.name}, unit {each.unit.serial}" for each in members]
        members[0].unit.ranks.agree(lines, what="reducing the gradients of a step")
        for group in _groups(members):
            _start(group, context)


def _is_current(each: WholeGradient) -> bool:
    """Return whether it is still to be reduced, and its parameter's gradient."""
    parameter = each.unit.parameter()
    if parameter is None or each.full is None:
        return False
    with no_torch_function():
        grad = parameter.grad
    return getattr(grad, "whole", None) is each


def _groups(members: Sequence[WholeGradient]) -> Iterator[list[WholeGradient]]:
    """Yield neighbours of one type, up to `GROUP_BYTES`."""
    group: list[WholeGradient] = []
    held = 0
    for each in members:
        full = each.full
        assert full is not None, "only those that are kept"
        if group and (full.dtype != group[0].shard.dtype or held + full.nbytes > GROUP_BYTES):
            yield group
            group, held = [], 0
        group.append(each)
        held += full.nbytes
    if group:
        yield group


def _start(group: Sequence[WholeGradient], context: Context) -> None:
    first = group[0].unit
    _, reductions = context.collectives(first.shard_group)
    what = f"reducing the gradients of {first.name}" + (f" and {len(group) - 1} more" if len(group) > 1 else "")
    fulls = [full for each in group if (full := each.full) is not None]
    parts = [each.unit.split(each.shard, full) for each, full in zip(group, fulls, strict=True)]
    fulls.clear()
    count = (first.shard_group.size - 1) * sum(each.shard.nbytes for each in group)

    def reduce() -> None:
        with moving([context.lanes.meter], "to ranks", count, what):
            reductions.reduce_scatter([f for _, full in parts for f in full], [s for own, _ in parts for s in own])

    def ended() -> None:
        if not isinstance(context.lanes.reduce, StreamLane):  # there it has only begun: it holds them until it is over
            parts.clear()

    with context.lanes.meter.waiting():
        pending = context.lanes.start(context.lanes.reduce, reduce, ended=ended)
    context.lanes.meter.moved("to ranks", count)
    for each in group:
        each.begin(pending, what)
        context.whole_gradients.discard(each)
