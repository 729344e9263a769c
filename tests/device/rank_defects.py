"""Defects of the product, put in on purpose: each takes away one thing that orders transfers, and training must show it.

`SEEDED[name]` replaces a function of the product for as long as a patch lasts; `found` trains with it and returns what showed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import late
import pytest
import torch
from late_training import PLACEMENTS, Options, same, train
from rank_late import DEFECTS, watched_drives

from zinf_compile.runtime import context, swap_steps
from zinf_compile.runtime.device import link
from zinf_compile.runtime.lanes.lanes import Done
from zinf_compile.runtime.lanes.stream_lane import StreamTransfer, TransferToHost
from zinf_compile.runtime.memory.arena import GatherMemory
from zinf_compile.runtime.transfer.chunk_buffers import ChunkBuffer

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True)
class Seeded:
    """A defect, where it shows, and by what at least."""

    put_in: Callable[[Patch], None]
    place: str | Options
    """One of `late_training.PLACEMENTS`, or options."""
    shows: str
    """A counter of the device, or "other bits"."""
    ranks: int = 1


@functools.cache
def _expected(rank: int, size: int) -> list[torch.Tensor]:
    return train("cpu", None if size == 1 else {}, rank=rank)[0]


def found(rank: int, size: int, name: str | None, options: Options) -> set[str]:
    """Train on the device with a defect, or without one; return counters that aren't zero, "other bits", "an error"."""
    expected = _expected(rank, size)
    shown: set[str] = set()
    with Patch.context() as patch, watched_drives(), late.delays(0.001, seed=5 + rank):
        if name is not None:
            SEEDED[name].put_in(patch)
        try:
            there, counts = train("late", options, rank=rank)
            shown |= set() if same(there, expected) else {"other bits"}
            shown |= {counter for counter in ("copies of unpinned memory",) if counts[2][counter]}
        except Exception:  # of the product: it has noticed, too
            counts = [late.counters()]
            shown.add("an error")
    counted = sum(counts, Counter())
    return shown | {counter for counter in DEFECTS if counted[counter]}


_wait, _issue = StreamTransfer.wait, StreamTransfer.issue


def _waits_for_nothing(transfer: StreamTransfer) -> None:
    transfer._wait_issued()


def _waits_elsewhere(transfer: StreamTransfer) -> None:
    with torch.Stream(transfer._device):
        _wait(transfer)


def _records_before(transfer: StreamTransfer, stream: torch.Stream, *others: Any) -> None:
    early = stream.record_event()
    _issue(transfer, stream, *others)
    transfer._event = early


def _records_nothing(transfer: StreamTransfer, stream: torch.Stream, *others: Any) -> None:
    _issue(transfer, stream, *others)
    transfer._event = torch.Event(transfer._device)


def _begins_at_once(transfer: StreamTransfer, stream: torch.Stream, compute: torch.Event, after: Any) -> None:
    _issue(transfer, stream, torch.Stream(transfer._device).record_event(), after)


def _lets_device_memory_go(transfer: StreamTransfer, *others: Any) -> None:
    _issue(transfer, *others)
    transfer._transfer = None


def _lets_all_go(transfer: StreamTransfer, *others: Any) -> None:
    _issue(transfer, *others)
    transfer._transfer, transfer._host_memory = None, ()


def _waits_on_the_stream_alone(copy: TransferToHost) -> None:
    copy.transfer.wait()


def _is_there(buffer: ChunkBuffer) -> None:
    buffer.under_way = []


def _leaves_at_once(patch: Patch) -> None:
    one, several = swap_steps.swap_out, swap_steps.swap_out_together
    patch.setattr(swap_steps, "swap_out", lambda unit, shard, dst, reduction: one(unit, shard, dst, Done()))
    patch.setattr(swap_steps, "swap_out_together", lambda leaving: several([(unit, shard, Done()) for unit, shard, _ in leaving]))


def _one_buffer(patch: Patch) -> None:
    buffers: dict[Any, torch.Tensor] = {}
    really = context.Context.gather_buffer

    def gather_buffer(self: context.Context, *what: Any) -> torch.Tensor:
        return buffers.setdefault(what, really(self, *what))

    patch.setattr(context.Context, "gather_buffer", gather_buffer)


def _of(owner: object, name: str, value: object) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, value)


UNORDERED, BITS = "unordered accesses", "other bits"
MANY_CHUNKS = {**PLACEMENTS["drive, updated on the device"], "compute_shape": {"piece_numel": 4096}}

SEEDED: dict[str, Seeded] = {
    "an event is dropped": Seeded(_of(StreamTransfer, "wait", _waits_for_nothing), "parameters on the host", UNORDERED),
    "the wrong stream waits": Seeded(_of(StreamTransfer, "wait", _waits_elsewhere), "parameters on the host", UNORDERED),
    "an event is recorded before the copy": Seeded(
        _of(StreamTransfer, "issue", _records_before), "parameters on the host", UNORDERED
    ),
    "a wait comes before the record": Seeded(
        _of(StreamTransfer, "issue", _records_nothing), "parameters on the host", "waits for unrecorded events"
    ),
    "a gradient leaves before it is computed": Seeded(
        _of(StreamTransfer, "issue", _begins_at_once), "gradients on the host", UNORDERED
    ),
    "a gradient is freed while it leaves": Seeded(
        _of(StreamTransfer, "issue", _lets_device_memory_go), "gradients on the host", UNORDERED
    ),
    "host memory is lent again while it is read": Seeded(_of(StreamTransfer, "issue", _lets_all_go), "drive", BITS),
    "the host reads before a copy is over": Seeded(
        _of(TransferToHost, "wait", _waits_on_the_stream_alone), "gradients on the host", BITS
    ),
    "host memory isn't pinned": Seeded(
        _of(link, "GatherMemory", lambda **_: GatherMemory()), "gradients on the host", "copies of unpinned memory"
    ),
    "an update doesn't wait for its chunk": Seeded(
        _of(ChunkBuffer, "drain", _is_there), "host, updated on the device", UNORDERED
    ),
    "a chunk's buffer is used again before it left": Seeded(_of(ChunkBuffer, "reuse", _is_there), MANY_CHUNKS, UNORDERED),
    "compute doesn't wait for a gather": Seeded(_of(context.Context, "finish", lambda *_: None), "device", UNORDERED, ranks=2),
    "a second gather goes to a buffer in use": Seeded(_one_buffer, {"bucket": "8KiB"}, UNORDERED, ranks=2),
    "a gradient leaves before it is reduced": Seeded(_leaves_at_once, "gradients on the host", UNORDERED, ranks=2),
    "a gather doesn't wait for what it gathers": Seeded(
        _of(StreamTransfer, "wait", _waits_for_nothing), "parameters on the host", UNORDERED, ranks=2
    ),
}
