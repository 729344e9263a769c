"""Cases of tests/support on the device: with streams that are late, and with nothing left unordered. On one rank or several."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import late
import pytest
import torch

import zinf_compile
from zinf_compile.checkpoint.file_layout import Part
from zinf_compile.checkpoint.parts_writer import PartsWriter
from zinf_compile.checkpoint.shard_reader import ShardReading
from zinf_compile.runtime.storage.engine import Engine, File, Request

LONGEST_S = 0.0005
"""The longest delay of each work of a stream."""

DEFECTS = (
    "unordered accesses",
    "waits for unrecorded events",
    "sources changed before their copy",
    "record_stream",
    "failures on streams",
)
"""Counters that stay at zero."""


@contextlib.contextmanager
def watched_drives() -> Iterator[None]:
    """Context in which the device's detector knows what drives do to host memory, and what the host has waited for of it.

    So it does of checkpoints, which fill it from files, and read it to be saved, without an operator of PyTorch's.
    """
    submit, wait, finish, save = Engine._submit, Request.wait, ShardReading.finish, PartsWriter.write
    if submit.__module__ == __name__:  # inside of another one
        yield
        return
    numbers: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()

    def submitted(self: Engine, file: File, offset: int, memory: Any, *, write: bool, checksum: bool) -> Request:
        number = 0
        if isinstance(memory, torch.Tensor):
            number = late.drive_begins(
                "write to a drive" if write else "read from a drive", memory.data_ptr(), memory.nbytes, writes=not write
            )
        request = submit(self, file, offset, memory, write=write, checksum=checksum)
        numbers[request] = number
        return request

    def waited(self: Request) -> int | None:
        found = wait(self)
        late.drive_ended(numbers.get(self, 0))
        return found

    def finished(self: ShardReading, into: torch.Tensor) -> None:
        late.drive_ended(late.drive_begins("filling from a file", into.data_ptr(), into.nbytes, writes=True))
        finish(self, into)  # by this thread, with operators, too

    def saved(self: PartsWriter, part: Part, start: int, values: torch.Tensor) -> None:
        number = late.drive_begins("saving to a file", values.data_ptr(), values.nbytes, writes=False)
        save(self, part, start, values)
        late.drive_ended(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_submit", submitted)
        patch.setattr(Request, "wait", waited)
        patch.setattr(ShardReading, "finish", finished)
        patch.setattr(PartsWriter, "write", saved)
        yield


def on_device(rank: int, size: int, seed: int, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call `function(rank, size, *args, device="late")` with delays of this seed; raise where the device counts a defect."""
    zinf_compile.reset()
    late.clear()
    with watched_drives(), late.delays(LONGEST_S, seed=seed + rank, chance=0.3):
        value = function(rank, size, *args, device="late", **named)
        torch.accelerator.synchronize()
    check()
    return value


def check(counted: Mapping[str, int] | None = None) -> None:
    """Raise where the device has counted a defect since `late.clear`, or among what was counted before that."""
    assert not late.defects(), late.defects()[:6]
    counted = late.counters() if counted is None else counted
    found = {name: count for name, count in counted.items() if name.split(":")[0] in DEFECTS}
    assert not found, found
