"""What reads a shard that a step has still to update: it gets all of it, updated."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zinf_compile.errors import StepFailedError
from zinf_compile.runtime.lanes.link_meter import Meter
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.units.backing import NvmeBacking
from zinf_compile.runtime.units.nvme_shards import NvmeShards, ShardSpec
from zinf_compile.runtime.units.pending_updates import Updates, begin_after_landing

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

SPANS = [(0, 1024), (1024, 2048), (2048, 2500)]


class Sample:
    """As much of a unit as matters here."""

    def __init__(self, shards: NvmeShards, index: int) -> None:
        self.backing = NvmeBacking(shards, index)


@pytest.fixture
def units(tmp_path: Path) -> Iterator[list[Any]]:
    """Return two units of 2,500 elements, all 1, in pieces of 1,024."""
    engine = Engine()
    shards = NvmeShards(
        [tmp_path],
        "parameter",
        [ShardSpec(name, 2500, torch.float32) for name in "ab"],
        engine,
        Meter(),
        BufferPool(1 << 20),
        piece_numel=1024,
    )
    made = [Sample(shards, index) for index in range(2)]
    for unit in made:
        unit.backing.write(torch.ones(2500)).wait()
    yield made
    shards.store.close()
    engine.close()


def update(updates: Updates, unit: Any, *spans: tuple[int, int]) -> None:
    """Do what a step does: write, then say so."""
    for start, end in spans:
        value = torch.full((end - start,), 2.0)
        unit.backing.write(value, start).wait()
        updates.updated(unit, start, end, value)


@pytest.mark.parametrize("before", range(4), ids="{} pieces before".format)
def test_a_shard_is_read_whole_however_far_its_update_is(before: int, units: list[Any]) -> None:
    unit, other = units
    updates = Updates({unit: SPANS})
    update(updates, unit, *SPANS[:before])
    into, beside = torch.zeros(2500), torch.zeros(2500)
    arriving, elsewhere = updates.read(unit, into), updates.read(other, beside)
    update(updates, unit, *SPANS[before:])
    arriving.wait()
    elsewhere.wait()
    assert into.unique().tolist() == [2.0]
    assert beside.unique().tolist() == [1.0], "nothing is due there"
    sizes = [4096, 4096, 4096]
    assert updates.spared_bytes == sum(sizes[before:]), "what is handed over isn't read"
    updates.wait()
    updates.close()


def test_waiting_is_for_one_unit_or_for_all(units: list[Any]) -> None:
    updates = Updates(dict.fromkeys(units, SPANS))
    update(updates, units[0], *SPANS)
    updates.wait(units[0])
    over = threading.Event()
    waiting = threading.Thread(target=lambda: (updates.wait(), over.set()))
    waiting.start()
    update(updates, units[1], *SPANS[:2])
    assert not over.wait(0.05)
    update(updates, units[1], SPANS[2])
    waiting.join()
    assert over.is_set()


def test_a_failure_ends_every_read_and_is_told_once(units: list[Any]) -> None:
    updates = Updates(dict.fromkeys(units, SPANS))
    update(updates, units[0], *SPANS)
    into = torch.zeros(2500)
    cut_short = updates.read(units[1], into)
    updates.fail(lambda: StepFailedError("broken"))
    for _ in range(2):
        with pytest.raises(StepFailedError, match="broken"):
            cut_short.wait()
    updates.wait()
    updates.read(units[1], into).wait()
    assert into.unique().tolist() == [1.0]


@pytest.mark.parametrize("told", ["wait", "read"])
def test_who_asks_first_is_told(told: str, units: list[Any]) -> None:
    updates = Updates(dict.fromkeys(units, SPANS))
    updates.fail(lambda: StepFailedError("broken"))
    updates.replace(units[0])
    with pytest.raises(StepFailedError, match="broken"):
        updates.wait(units[1]) if told == "wait" else updates.read(units[1], torch.zeros(2500))
    updates.wait()


def test_a_failure_is_no_matter_once_all_is_replaced(units: list[Any]) -> None:
    updates = Updates(dict.fromkeys(units, SPANS))
    update(updates, units[0], *SPANS)
    updates.fail(lambda: StepFailedError("broken"))
    for unit in units:
        updates.replace(unit)
    updates.wait()


class InMemory:
    """A unit whose shard is in memory."""

    backing = None


class Copy:
    """A copy that counts who was ordered after it."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_a_reader_of_memory_comes_after_the_update_of_its_part_and_its_copies() -> None:
    unit, copy = InMemory(), Copy()
    updates: Updates[Any] = Updates({unit: SPANS})
    updates.updated(unit, *SPANS[1], torch.ones(1024), [copy])
    updates.wait(unit, *SPANS[1])
    part = updates.arrival(unit, *SPANS[1])
    assert part is not None
    part.wait()
    assert copy.waits == 2
    whole, over = updates.arrival(unit), threading.Event()
    assert whole is not None
    waiting = threading.Thread(target=lambda: (whole.wait(), over.set()))
    waiting.start()
    updates.updated(unit, *SPANS[0], torch.ones(1024))
    assert not over.wait(0.05)
    updates.updated(unit, *SPANS[2], torch.ones(452))
    waiting.join()
    assert copy.waits == 3
    updates.close()
    assert updates.arrival(unit) is None, "copies are over by then"


def test_a_transfer_begins_when_what_it_reads_is_updated() -> None:
    unit, copy, begun = InMemory(), Copy(), list[str]()
    updates: Updates[Any] = Updates({unit: SPANS})

    def begin(name: str) -> Copy:
        begun.append(name)
        return copy

    first, last = (
        updates.begin_after([(unit, *SPANS[number])], functools.partial(begin, name))
        for number, name in ((0, "first"), (2, "last"))
    )
    assert not begun
    updates.updated(unit, *SPANS[2], torch.ones(452))
    assert begun == ["last"]
    updates.begin_after([(unit, *SPANS[2])], lambda: begin("at once")).wait()
    assert begun == ["last", "at once"]
    last.wait()
    updates.fail(lambda: StepFailedError("broken"))
    with pytest.raises(StepFailedError, match="broken"):
        first.wait()
    assert begun == ["last", "at once"]


def test_a_transfer_of_several_units_begins_when_the_last_one_is_updated() -> None:
    units, copy, begun = [InMemory(), InMemory(), InMemory()], Copy(), list[str]()
    updates: Updates[Any] = Updates({units[0]: SPANS, units[1]: SPANS[:1]})

    def begin() -> Copy:
        begun.append("together")
        return copy

    together = updates.begin_after([(unit, 0, 2500) for unit in units], begin)
    for span in SPANS:
        updates.updated(units[0], *span, torch.ones(span[1] - span[0]))
        assert not begun
    updates.updated(units[1], *SPANS[0], torch.ones(1024))
    assert begun == ["together"]
    together.wait()
    updates.begin_after([(unit, 0, 2500) for unit in units], begin).wait()
    assert (begun, copy.waits) == (["together"] * 2, 2)


def test_a_transfer_of_several_units_fails_with_the_update() -> None:
    units = [InMemory(), InMemory()]
    updates: Updates[Any] = Updates(dict.fromkeys(units, SPANS))
    together = updates.begin_after([(unit, 0, 2500) for unit in units], Copy)
    for span in SPANS:
        updates.updated(units[0], *span, torch.ones(span[1] - span[0]))
    updates.fail(lambda: StepFailedError("broken"))
    with pytest.raises(StepFailedError, match="broken"):
        together.wait()


def test_a_transfer_that_does_not_begin_fails_for_who_waits(units: list[Any]) -> None:
    """And not for the step. Here it comes after what an update hands over."""
    updates = Updates({units[0]: SPANS})
    landing = updates.read(units[0], torch.zeros(2500))

    def begin() -> Any:
        raise OSError("no link")

    begun = begin_after_landing(landing, begin)
    update(updates, units[0], *SPANS)
    for _ in range(2):
        with pytest.raises(OSError, match="no link"):
            begun.wait()
    updates.wait()
    begun = begin_after_landing(landing, Copy)
    begun.wait()
    updates.close()


def test_who_needs_neither_values_nor_states_is_told_of_no_failure() -> None:
    unit = InMemory()
    updates: Updates[Any] = Updates({unit: SPANS})
    updates.fail(lambda: StepFailedError("broken"))
    updates.settle(unit)
    updates.settle()
    with pytest.raises(StepFailedError, match="broken"):
        updates.wait(unit)
