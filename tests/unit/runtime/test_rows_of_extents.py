"""Small extents that lie next to one another are moved by one request; each keeps its own checksum, order and errors."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults import tamper
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.errors import StoreError, StoreRequestError
from zinf_compile.ir.sizes import ROW_BYTES, SMALL_BYTES
from zinf_compile.ir.tiers import Topology
from zinf_compile.runtime.lanes.lanes import Done, Pending
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.storage.block_io import BlockIO
from zinf_compile.runtime.storage.direct_file import File
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.extent_store import Store
from zinf_compile.runtime.storage.extents import Layout
from zinf_compile.runtime.storage.stores import move_together as move_extents
from zinf_compile.runtime.transfer.move import Location, Route, move_together

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

PAGE = 4096
Rows = list[tuple[object, torch.Tensor]]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def values_of(sizes: list[int]) -> Rows:
    """Return random bytes for each extent, by its number."""
    drawn = torch.Generator().manual_seed(len(sizes))
    return [(key, torch.randint(256, (size,), dtype=torch.uint8, generator=drawn)) for key, size in enumerate(sizes)]


def blanks(rows: Rows) -> Rows:
    """Return memory for the same extents."""
    return [(key, torch.zeros_like(value)) for key, value in rows]


def same(some: Rows, others: Rows) -> bool:
    """Say whether the same extents hold the same bytes."""
    return all(mine == theirs and a.equal(b) for (mine, a), (theirs, b) in zip(some, others, strict=True))


@contextlib.contextmanager
def files_aligned(alignments: Sequence[int]) -> Iterator[None]:
    """Context in which files take direct transfers at these alignments, in turn; at 1 none: a filesystem that refuses them."""
    really, turns = File._try_direct, itertools.cycle(alignments)

    def try_direct(file: File, opened: int, flags: int) -> None:
        alignment = next(turns)
        if alignment > 1:
            really(file, opened, flags)
            file.alignment = alignment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(File, "_try_direct", try_direct)
        yield


SIZES = st.lists(st.sampled_from([0, 1, 3072, PAGE, PAGE + 1, SMALL_BYTES, SMALL_BYTES + 1, 3 << 18]), min_size=1, max_size=9)


@pytest.mark.parametrize("alignments", [(PAGE,), (1,), (PAGE, PAGE), (PAGE, 4 * PAGE), (PAGE, 1)], ids=str)
@given(sizes=SIZES, data=st.data(), cap=st.sampled_from([4 * PAGE, 9 * PAGE, 1 << 22]), verify=st.booleans())
def test_what_is_moved_together_is_what_is_moved_alone(
    tmp_path_factory: pytest.TempPathFactory,
    engine: Engine,
    alignments: tuple[int, ...],
    sizes: list[int],
    data: st.DataObject,
    cap: int,
    verify: bool,
) -> None:
    folder, rows = tmp_path_factory.getbasetemp(), values_of(sizes)
    shares = (1.0, 2.0)[: len(alignments)]
    paths: dict[str, Any] = {"paths": [folder] * len(shares), "shares": shares}
    with (
        files_aligned(alignments),
        Store(**paths, extents=[*enumerate(sizes)], engine=engine, staging_bytes=cap, verify=verify) as store,
    ):
        store.staging.limit(cap)
        ways = st.sampled_from(["alone", "together"])

        def move(rows: Rows, *, write: bool) -> None:
            rows = data.draw(st.permutations(rows))
            if data.draw(ways) == "together":
                (store.write_together if write else store.read_together)(rows).wait()
            else:
                for transfer in [(store.write if write else store.read)(key, tensor) for key, tensor in rows]:
                    transfer.wait()

        move(rows, write=True)
        for _ in range(2):
            some = data.draw(st.lists(st.sampled_from(rows), unique_by=lambda row: row[0]))
            into = blanks(some)
            move(into, write=False)
            assert same(some, into)
            rows = [(key, value + 1) for key, value in rows]
            move(rows, write=True)
        into = blanks(rows)
        move(into, write=False)
        assert same(rows, into)


def test_small_extents_are_one_request_whatever_lies_between_them(tmp_path: Path, engine: Engine) -> None:
    sizes = [3072, 3 << 20, 100, 3 << 20, 3072]
    with Store(tmp_path, [*enumerate(sizes)], engine=engine) as store:
        rows = values_of(sizes)
        before = engine.requests
        store.write_together(rows).wait()
        assert engine.requests - before == 3
        small = [row for row in blanks(rows) if row[0] in (0, 2, 4)]
        store.read_together(small).wait()
        assert engine.requests - before == 4
        assert same(small, rows[::2])
        store.read_together([small[0], small[2]]).wait()
        assert engine.requests - before == 6, "what lies between them isn't read"


def test_a_request_is_no_larger_than_a_row_nor_than_the_staging(tmp_path: Path, engine: Engine) -> None:
    sizes = [SMALL_BYTES] * 20
    with Store(tmp_path, [*enumerate(sizes)], engine=engine, block_bytes=SMALL_BYTES, staging_bytes=ROW_BYTES) as store:
        before = engine.requests
        store.write_together(values_of(sizes)).wait()
        assert engine.requests - before == 3
        assert store.staging.peak_bytes <= ROW_BYTES
        store.staging.clear()
        store.staging.limit(2 * SMALL_BYTES)
        store.read_together(blanks(values_of(sizes))).wait()
        assert engine.requests - before == 13


@pytest.mark.parametrize(("extents", "row"), [(8192, 256), (1024, 64), (16, 1), (3, 1)])
def test_rows_are_on_one_device_each_and_all_devices_have_some(extents: int, row: int) -> None:
    layout = Layout([(key, PAGE) for key in range(extents)], block_bytes=1 << 20, alignment=PAGE, shares=(1.0, 1.0))
    assert max(layout.file_bytes) - min(layout.file_bytes) <= row * PAGE
    groups = layout.adjacent(layout.blocks, ROW_BYTES)
    assert [len(group) for group in groups] == [row] * (extents // row)
    assert all(len({block.device for block in group}) == 1 for group in groups)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_changed_block_is_named_and_its_neighbours_can_be_read(tmp_path: Path, engine: Engine, broken: int) -> None:
    rows = values_of([3072, 100, PAGE])
    with Store(tmp_path, [(key, value.numel()) for key, value in rows], engine=engine) as store:
        store.write_together(rows).wait()
        (block,) = store.layout.find(broken).blocks
        tamper(store.files[0].fd, bytes([int(rows[broken][1][0]) ^ 1]), block.offset)
        into = blanks(rows)
        with pytest.raises(StoreError, match=rf"of extent {broken} .*returned other bytes than were written"):
            store.read_together(into).wait()
        others = [row for row in into if row[0] != broken]
        store.read_together(others[:1]).wait()
        store.read_together(others[1:]).wait()
        assert same(others, [row for row in rows if row[0] != broken])


def test_a_row_with_a_block_that_was_never_written_is_refused_and_reads_nothing(tmp_path: Path, engine: Engine) -> None:
    rows = values_of([3072, 100, PAGE])
    with Store(tmp_path, [(key, value.numel()) for key, value in rows], engine=engine) as store:
        store.write_together(rows[:2]).wait()
        into = blanks(rows)
        with pytest.raises(StoreRequestError, match=r"extent 2 .*was never written"):
            store.read_together(into)
        assert same(into, blanks(rows))
        store.write_together(rows).wait()
        store.read_together(into).wait()
        assert same(into, rows)


def test_a_failed_write_of_a_row_leaves_none_of_it_for_certain(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = values_of([3072, 100, PAGE])
    with Store(tmp_path, [(key, value.numel()) for key, value in rows], engine=engine) as store:
        store.write_together(rows).wait()
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "write", lambda *_, **__: SimpleNamespace(wait=fail, done=lambda: True, times=None))
            with pytest.raises(StoreError, match=r"cannot write bytes .* of extent 0 .* to bytes .* of extent 2 .*it burns"):
                store.write_together(rows).wait()
        for row in blanks(rows):
            with pytest.raises(StoreError, match=rf"extent {row[0]} .*its last write failed"):
                store.read_together([row])
        store.write_together(rows).wait()
        into = blanks(rows)
        store.read_together(into).wait()
        assert same(into, rows)


def fail() -> None:
    raise OSError(5, "it burns")


def test_memory_is_let_go_of_when_it_was_moved(tmp_path: Path, engine: Engine) -> None:
    """Others of a row may be waited for much later, and hold the transfer until then."""
    rows = values_of([3072, 100, SMALL_BYTES + 1])
    with Store(tmp_path, [(key, value.numel()) for key, value in rows], engine=engine) as store:
        store.write_together(rows).wait()
        into = blanks(rows)
        reading = store.read_together(into)
        memories = [weakref.ref(memory.untyped_storage()) for _, memory in into]
        reading.wait()
        assert same(into, rows)
        into.clear()
        assert [memory() for memory in memories] == [None] * 3
        assert reading.done()


@pytest.mark.parametrize("moment", ["fill", "submit", "leave"])
def test_an_interrupt_loses_no_staging_and_holds_nobody_up(
    moment: str, tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a row is copied to its buffer, handed to the engine, or taken off the list of those under way."""
    rows = values_of([3072, 100, PAGE])
    with Store(tmp_path, [(key, value.numel()) for key, value in rows], engine=engine, staging_bytes=1) as store:
        really = getattr(BlockIO, moment)

        def interrupted(*args: Any) -> None:
            if moment == "submit":
                really(*args)
            raise KeyboardInterrupt

        for _ in range(2 * store.staging.cap_bytes // (3 * PAGE) if moment == "submit" else 2):
            with monkeypatch.context() as patched:
                patched.setattr(BlockIO, moment, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    store.write_together(rows).wait()
        into = blanks(rows)
        store.write_together(rows).wait()
        store.read_together(into).wait()
        assert same(into, rows)
        store.staging.clear()
        assert store.staging.bytes == 0


def test_rows_and_single_extents_that_meet_keep_their_order(tmp_path: Path, engine: Engine) -> None:
    first, second = values_of([3072, 100, PAGE]), [(key, value + 1) for key, value in values_of([3072, 100, PAGE])]
    with Store(tmp_path, [(key, value.numel()) for key, value in first], engine=engine) as store:
        into, alone = blanks(first), torch.zeros(100, dtype=torch.uint8)
        transfers = [
            store.write_together(first),
            store.read(1, alone),
            store.write(1, second[1][1]),
            store.read_together(into),
            store.write_together(second),
        ]
        for transfer in transfers:
            transfer.wait()
        assert alone.equal(first[1][1])
        assert same(into, [first[0], second[1], first[2]])
        store.read_together(into).wait()
        assert same(into, second)


def test_without_verification_rows_come_as_they_are(tmp_path: Path, engine: Engine) -> None:
    rows = values_of([3072, 100])
    with Store(tmp_path, [(key, value.numel()) for key, value in rows], engine=engine, verify=False) as store:
        store.write_together(rows).wait()
        tamper(store.files[0].fd, bytes(3072), 0)
        into = blanks(rows)
        store.read_together(into).wait()
        assert into[0][1].sum() == 0
        assert into[1][1].equal(rows[1][1])


def test_what_is_named_twice_is_moved_twice(tmp_path: Path, engine: Engine) -> None:
    with Store(tmp_path, [("x", 100), ("y", 100)], engine=engine) as store:
        value = values_of([100])[0][1]
        store.write_together([("x", value), ("y", value), ("x", value + 1)]).wait()
        into = [torch.zeros(100, dtype=torch.uint8) for _ in range(3)]
        store.read_together([("x", into[0]), ("y", into[1]), ("x", into[2])]).wait()
        assert into[0].equal(into[2])
        assert into[0].equal(value + 1)


def test_who_moves_several_and_is_stopped_waits_for_what_has_begun() -> None:
    waited: list[str] = []

    class Began:
        def wait(self) -> None:
            waited.append("for what has begun")

    def refuse(into: torch.Tensor) -> Pending:
        raise StoreRequestError("refused")

    store: Any = SimpleNamespace(read=lambda key, into: refuse(into) if key else Began())
    with pytest.raises(StoreRequestError, match="refused"):
        move_extents(store, [(key, aligned_buffer(8)) for key in (0, 0, 1)], write=False)
    assert waited == ["for what has begun"] * 2
    waited.clear()

    link: Any = SimpleNamespace(topology=Topology(host_apart=False), wait_read=lambda *_: None)
    route = Route(link, lambda job: Done())
    rows = [(Location(read=read), aligned_buffer(8)) for read in (lambda into: Began(), refuse)]
    with pytest.raises(StoreRequestError, match="refused"):
        move_together(rows, by=route, write=False)
    assert waited == ["for what has begun"]
