"""Hops of saved values between the device, host memory and drives, as a schedule asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zinf_compile.errors import UnsupportedModelError
from zinf_compile.ir.tiers import Tier
from zinf_compile.ir.value_spans import span_of
from zinf_compile.runtime.lanes.lanes import All, Done, Pending, wait_for_all
from zinf_compile.runtime.lanes.link_meter import READ, WRITTEN
from zinf_compile.runtime.lanes.stream_lane import on_stream
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.storage.value_space import ValueSpace

from .move import Location, Route, move, on_host
from .saved_value import SavedValue
from .value_memory import ValueMemory, by_storage, bytes_of, form_of

if TYPE_CHECKING:
    from zinf_compile.runtime.context import Context


class LeavingValues:
    """Values on their way from the device; until a hop is over, it holds what that copies from."""

    def __init__(self, values: Sequence[SavedValue], sources: Sequence[torch.Tensor], pending: Pending) -> None:
        self.values = values
        self._sources: Sequence[torch.Tensor] = sources
        self._pending: Pending | None = pending

    @property
    def memories(self) -> list[ValueMemory]:
        """Their memories, mostly one."""
        return list({id(value.memory): value.memory for value in self.values}.values())

    def wait(self) -> None:
        """Return when what the last hop copies from may be used again by what the caller issues next."""
        if self._pending is not None:
            on_stream(self._pending).wait()
            self._pending, self._sources = None, ()

    def value(self, number: int) -> SavedValue:
        """Return the stand-in for one of them."""
        return self.values[number]


class ReturningValues:
    """Values on their way to the device."""

    def __init__(self, values: Sequence[SavedValue], buffers: dict[int, torch.Tensor], pending: Pending) -> None:
        self.values = values
        self.buffers = buffers
        """By the identity of their memory: where it will be."""
        self.pending = pending

    def wait(self) -> None:
        """Return when they may be used by what the caller issues next."""
        self.pending.wait()

    def value(self, number: int) -> torch.Tensor:
        """Return one of them; it may be used once `pending` is over."""
        value = self.values[number]
        with torch.inference_mode(False), torch.no_grad():
            return value.on(self.buffers[id(value.memory)])


def swap_out(values: Sequence[torch.Tensor], dst: str, context: Context, space: ValueSpace | None, name: str) -> LeavingValues:
    """Start the hop of values from the device to host memory, or to drives where that is the device."""
    stand_ins: dict[int, SavedValue] = {}
    sources: list[torch.Tensor] = []
    pending: list[Pending] = []
    with torch.inference_mode(False), torch.no_grad():
        for positions in by_storage(values):
            forms = [form_of(values[position]) for position in positions]
            span = span_of(forms)
            memory = ValueMemory(values[positions[0]].device, span)
            for position, form in zip(positions, forms, strict=True):
                stand_ins[position] = SavedValue(memory, form, values[position].dtype, f"value {position} of {name}")
            sources.append(bytes_of(values[positions[0]], span))
            memory.arriving = _leave(memory, sources[-1], dst, context, space)
            pending.append(memory.arriving)
    return LeavingValues([stand_ins[position] for position in range(len(values))], sources, _together(pending))


def swap_on(leaving: LeavingValues, dst: str, context: Context, space: ValueSpace | None) -> LeavingValues:
    """Start the hop from host memory to drives, once the one before is over."""
    assert not Tier(dst).in_memory, "host memory is next to the device"
    leaving.wait()
    sources = [memory.host for memory in leaving.memories]
    for memory, source in zip(leaving.memories, sources, strict=True):
        if not memory.bytes:
            continue
        memory.arriving = _write(memory, source, context, space, after=memory.arriving)
    return LeavingValues(leaving.values, sources, _Leave(leaving.memories))


def swap_in(saved: Sequence[object], dst: str, context: Context) -> ReturningValues:
    """Start the hop of saved values to the device, or to host memory beside it."""
    values = [_checked(value) for value in saved]
    buffers: dict[int, torch.Tensor] = {}
    pending: list[Pending] = []
    with torch.inference_mode(False), torch.no_grad():
        for value in values:
            memory = value.memory
            if id(memory) in buffers:
                continue
            if not memory.bytes:
                buffers[id(memory)] = torch.empty(0, dtype=torch.uint8, device=memory.device)
                continue
            with context.lanes.meter.waiting():
                memory.arriving.wait()
            if memory.tier.in_memory:
                buffer = torch.empty(memory.bytes, dtype=torch.uint8, device=memory.device)
                pending.append(move(memory.location(), Location(buffer), by=_route(context)))
            else:
                buffer = _host_buffer(memory.bytes, context)
                reading = move(memory.location(), on_host(buffer), by=_route(context))
                pending.append(context.lanes.meter.follow(READ, memory.bytes, reading))
            buffers[id(memory)] = buffer
    return ReturningValues(values, buffers, _together(pending))


def swap_further(returning: ReturningValues, context: Context) -> ReturningValues:
    """Start the hop from host memory to the device, once the one from drives is over."""
    buffers: dict[int, torch.Tensor] = {}
    pending: list[Pending] = []
    with torch.inference_mode(False), torch.no_grad():
        for key, host in returning.buffers.items():
            buffers[key] = torch.empty(host.numel(), dtype=torch.uint8, device=context.device)
            if not host.numel():
                continue
            pending.append(move(on_host(host), Location(buffers[key]), by=_route(context), after=returning.pending))
    return ReturningValues(returning.values, buffers, _together(pending))


def _leave(memory: ValueMemory, source: torch.Tensor, dst: str, context: Context, space: ValueSpace | None) -> Pending:
    if not memory.bytes:
        memory.put_on_host(torch.empty(0, dtype=torch.uint8))
        return Done()
    if not Tier(dst).in_memory:
        return _write(memory, source, context, space, after=Done())
    return move(Location(source), memory.put_on_host(_host_buffer(memory.bytes, context)), by=_route(context))


def _write(memory: ValueMemory, source: torch.Tensor, context: Context, space: ValueSpace | None, *, after: Pending) -> Pending:
    assert space is not None, "a graph of which values go to drives has space there"
    written = move(on_host(source), memory.put_on_drive(space), by=_route(context), after=after)
    return context.lanes.meter.follow(WRITTEN, memory.bytes, written)


def _host_buffer(size: int, context: Context) -> torch.Tensor:
    """Return host memory that a link or a drive copies from and to directly, counted where it isn't the device's.

    Where it is, the system has it back as soon as the value is dropped, as compute's own memory: an arena keeps what it has lent
    at the most, and would have it beside what compute takes later.
    """
    if not context.link.topology.host_apart:
        return aligned_buffer(size)
    ledger = context.memory.host_ledger
    context.memory.make_room(ledger, size)
    buffer = context.link.host_buffer(size, torch.uint8)
    ledger.track("activations", buffer)
    return buffer


def _route(context: Context) -> Route:
    return Route(context.link, lambda job: context.lanes.start(context.lanes.saved, job))


def _together(pending: Sequence[Pending]) -> Pending:
    return pending[0] if len(pending) == 1 else All(pending)  # of none: over


class _Leave:
    """The end of writes to drives, after which host memory is let go."""

    def __init__(self, memories: Sequence[ValueMemory]) -> None:
        self._memories = memories

    def wait(self) -> None:
        """Return when all is written; raise the first error."""
        try:
            wait_for_all(memory.arriving.wait for memory in self._memories)
        finally:
            for memory in self._memories:
                memory.leave_host()


def _checked(value: object) -> SavedValue:
    if not isinstance(value, SavedValue):
        raise UnsupportedModelError(
            f"a value that option activations moved off the device came back to the backward as a {type(value).__name__}: hooks "
            "of saved tensors (torch.autograd.graph.saved_tensors_hooks) have to return such values as they are. Leave the hooks "
            "out, or use activations='keep'"
        )
    return value
