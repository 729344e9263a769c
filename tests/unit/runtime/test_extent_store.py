"""What is written to the store comes back, whatever its size, alignment and order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zinf_compile.errors import StoreRequestError, StoreWarning
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.extent_store import Store

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

BLOCK = 8192
SIZES = st.lists(st.integers(0, 5 * BLOCK + 3), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


def random_bytes(size: int, seed: int = 0, shift: int | None = None) -> torch.Tensor:
    """Return random bytes: from aligned memory, or `shift` bytes behind it."""
    memory = aligned_buffer(size + (shift or 0))[shift or 0 :]
    return memory.copy_(torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


@given(sizes=SIZES, data=st.data(), staging=st.sampled_from([1, 3 * BLOCK, 1 << 20]))
def test_round_trips_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, engine: Engine, sizes: list[int], data: st.DataObject, staging: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    with Store(folder, list(enumerate(sizes)), engine=engine, block_bytes=BLOCK, staging_bytes=staging) as store:
        shifts = data.draw(st.lists(st.sampled_from([0, 1, 512]), min_size=len(sizes), max_size=len(sizes)))
        values = [random_bytes(size, seed, shift) for seed, (size, shift) in enumerate(zip(sizes, shifts, strict=True))]
        for transfer in [store.write(key, values[key]) for key in data.draw(st.permutations(range(len(sizes))))]:
            transfer.wait()
        into = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        for transfer in [store.read(key, into[key]) for key in data.draw(st.permutations(range(len(sizes))))]:
            transfer.wait()
        assert all(a.equal(b) for a, b in zip(values, into, strict=True))
        assert store.staging.peak_bytes <= max(staging, BLOCK)


@given(size=st.integers(1, 6 * BLOCK), data=st.data())
def test_ranges_overwrite_what_they_cover(
    tmp_path_factory: pytest.TempPathFactory, engine: Engine, size: int, data: st.DataObject
) -> None:
    blocks = -(-size // BLOCK)
    with Store(tmp_path_factory.getbasetemp(), [("x", size)], engine=engine, block_bytes=BLOCK) as store:
        expected = random_bytes(size)
        store.write("x", expected.clone())
        for step in range(data.draw(st.integers(0, 5))):
            first = data.draw(st.integers(0, blocks - 1))
            start, end = first * BLOCK, min(size, data.draw(st.integers(first + 1, blocks)) * BLOCK)
            if data.draw(st.booleans()):
                expected[start:end] = random_bytes(end - start, step + 1)
                store.write("x", expected[start:end].clone(), offset=start)
            else:
                into = torch.zeros(end - start, dtype=torch.uint8)
                store.read("x", into, offset=start).wait()
                assert into.equal(expected[start:end])
        into = torch.zeros_like(expected)
        store.read("x", into).wait()
        assert into.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (100, 33)])
def test_tensors_of_any_type_and_shape(tmp_path: Path, engine: Engine, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.rand(shape).to(dtype)
    with Store(tmp_path, [("x", value.nbytes)], engine=engine) as store:
        store.write("x", value.requires_grad_(dtype.is_floating_point)).wait()
        into = torch.zeros_like(value)
        store.read("x", into).wait()
        assert into.equal(value)


def test_aligned_memory_is_not_copied(tmp_path: Path, engine: Engine) -> None:
    with Store(tmp_path, [("x", 4 * BLOCK)], engine=engine, block_bytes=BLOCK) as store:
        store.write("x", random_bytes(4 * BLOCK)).wait()
        store.read("x", aligned_buffer(4 * BLOCK)).wait()
        assert store.staging.peak_bytes == 0


def test_staging_stays_below_its_cap(tmp_path: Path, engine: Engine) -> None:
    cap = 4 * BLOCK
    with Store(tmp_path, [(key, 10 * BLOCK) for key in range(8)], engine=engine, block_bytes=BLOCK, staging_bytes=cap) as store:
        values = [random_bytes(10 * BLOCK, key, shift=1) for key in range(8)]
        into = [torch.zeros(10 * BLOCK + 1, dtype=torch.uint8)[1:] for _ in range(8)]
        writes = [store.write(key, value) for key, value in enumerate(values)]
        reads = [store.read(key, memory) for key, memory in enumerate(into)]
        for transfer in writes + reads:
            transfer.wait()
        assert all(a.equal(b) for a, b in zip(values, into, strict=True))
        assert 0 < store.staging.peak_bytes <= cap


def test_transfers_that_meet_keep_their_order(tmp_path: Path, engine: Engine) -> None:
    with Store(tmp_path, [("x", 4 * BLOCK)], engine=engine, block_bytes=BLOCK) as store:
        first, second = random_bytes(4 * BLOCK, 1), random_bytes(4 * BLOCK, 2)
        seen = [aligned_buffer(4 * BLOCK) for _ in range(2)]
        transfers = [store.write("x", first), store.read("x", seen[0]), store.write("x", second), store.read("x", seen[1])]
        for transfer in reversed(transfers):
            transfer.wait()
            assert transfer.done()
            transfer.wait()
        assert seen[0].equal(first)
        assert seen[1].equal(second)


def test_the_last_write_counts_when_nobody_waits(tmp_path: Path, engine: Engine) -> None:
    with Store(tmp_path, [("x", BLOCK)], engine=engine, block_bytes=BLOCK) as store:
        for number in range(50):
            store.write("x", torch.full((BLOCK,), number, dtype=torch.uint8))
        into = torch.zeros(BLOCK, dtype=torch.uint8)
        store.read("x", into).wait()
        assert into.unique().tolist() == [49]


def test_threads_share_a_store(tmp_path: Path, engine: Engine) -> None:
    """All blocks pass through two staging buffers, so that threads have to finish each other's."""
    wrong: list[object] = []

    def work(key: int) -> None:
        try:
            for step in range(20):
                value = random_bytes(5 * BLOCK - 1, seed=100 * key + step, shift=1)
                into = torch.zeros_like(value)
                store.write(key, value)
                store.read(key, into).wait()
                if not into.equal(value):
                    wrong.append((key, step))
        except BaseException as error:
            wrong.append(error)

    extents = [(key, 5 * BLOCK - 1) for key in range(6)]
    with Store(tmp_path, extents, engine=engine, block_bytes=BLOCK, staging_bytes=2 * BLOCK) as store:
        threads = [threading.Thread(target=work, args=(key,)) for key in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_stripes_use_every_path_by_its_share(tmp_path: Path, engine: Engine) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with Store(folders, [("x", 40 * BLOCK), ("y", 77)], engine=engine, block_bytes=BLOCK, shares=[3, 1]) as store:
        assert store.layout.file_bytes[0] == pytest.approx(3 * store.layout.file_bytes[1], abs=3 * BLOCK)
        value, into = random_bytes(40 * BLOCK), aligned_buffer(40 * BLOCK)
        store.write("x", value).wait()
        store.read("x", into).wait()
        assert into.equal(value)


def test_shares_are_measured(tmp_path: Path, engine: Engine) -> None:
    with Store([tmp_path, tmp_path], [("x", 100 * BLOCK)], engine=engine, block_bytes=BLOCK) as store:
        assert all(store.layout.file_bytes)


def test_without_verification_nothing_is_compared(tmp_path: Path, engine: Engine) -> None:
    with Store(tmp_path, [("x", BLOCK)], engine=engine, verify=False) as store:
        store.write("x", random_bytes(BLOCK)).wait()
        store.read("x", aligned_buffer(BLOCK)).wait()
        assert store.checks.generation(store.layout.find("x").blocks[0]) == 1


def test_a_store_makes_and_closes_its_own_engine(tmp_path: Path) -> None:
    with Store(tmp_path, [("x", 5)]) as store:
        store.write("x", torch.arange(5, dtype=torch.uint8)).wait()
    with pytest.raises(StoreRequestError, match="closed"):
        store.read("x", torch.zeros(5, dtype=torch.uint8))
    store.close()


def test_closing_waits_for_what_is_under_way(tmp_path: Path, engine: Engine) -> None:
    store = Store(tmp_path, [("x", 40 * BLOCK)], engine=engine, block_bytes=BLOCK)
    transfer = store.write("x", random_bytes(40 * BLOCK))
    store.close()
    assert transfer.done()
    transfer.wait()


def test_memory_as_a_drive_is_warned_of_once(engine: Engine) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    with pytest.warns(StoreWarning, match=r"'/dev/shm': tmpfs is memory") as warned, Store("/dev/shm", [("x", 5)], engine=engine):
        pass
    assert len(warned) == 1
