"""The store's files belong to one run: no death leaves one behind, no two stores meet, no child touches its parent's."""

from __future__ import annotations

import os
import select
import signal
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from programs import Program

from zinf_compile.errors import StoreRequestError
from zinf_compile.runtime.storage.extent_store import Store

pytestmark = pytest.mark.filterwarnings("ignore::zinf_compile.errors.StoreWarning")  # of a /tmp in memory

SIZE = 8 << 20
KILLED = """
import sys, time, torch
from zinf_compile.runtime.storage.extent_store import Store

store = Store(sys.argv[1], [("x", 64 << 20)])
value = torch.ones(64 << 20, dtype=torch.uint8)
print("begun", flush=True)
while True:
    store.write("x", value)
"""


def in_child(job: Callable[[], str]) -> str:
    """Run `job` in a forked child; return what it returns, or its error's text."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads beside a fork are the point
        child = os.fork()
    if child == 0:
        try:
            answer = job()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 60)
    answer = os.read(reading, 1 << 16).decode() if ready else "the child hangs"
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer


def test_files_have_no_name_and_one_reader(tmp_path: Path) -> None:
    with Store(tmp_path, [("x", SIZE)]) as store:
        assert os.listdir(tmp_path) == []
        (file,) = store.files
        found = os.fstat(file.fd)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_nlink == 0
        assert found.st_blocks * 512 >= SIZE
        assert not os.get_inheritable(file.fd)


def test_killed_while_writing_it_leaves_nothing(tmp_path: Path) -> None:
    with Program(KILLED, str(tmp_path)) as program:
        assert program.stdout.readline() == "begun\n"
        time.sleep(0.2)
        held = holders(tmp_path)
    assert program.process.pid in held
    assert os.listdir(tmp_path) == []
    assert program.process.pid not in holders(tmp_path)


def holders(folder: Path) -> set[int]:
    """Find the processes that hold nameless files which were made in `folder`."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith(f"{folder}/") and target.endswith("(deleted)"):
            found.add(int(link.parts[2]))
    return found


def test_two_stores_on_one_path_do_not_meet(tmp_path: Path) -> None:
    with Store(tmp_path, [("x", SIZE)]) as one, Store(tmp_path, [("x", SIZE)]) as other:
        values = [torch.full((SIZE,), number, dtype=torch.uint8) for number in (1, 2)]
        for transfer in [store.write("x", value) for store, value in zip((one, other), values, strict=True)]:
            transfer.wait()
        for store, value in zip((one, other), values, strict=True):
            into = torch.zeros_like(value)
            store.read("x", into).wait()
            assert into.equal(value)


def test_a_child_is_refused_and_holds_nothing(tmp_path: Path) -> None:
    value = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
    with Store(tmp_path, [("x", SIZE)]) as store:
        writing = store.write("x", value)

        def use() -> str:
            if os.getpid() in holders(tmp_path):
                return "the child holds the file"
            store.read("x", torch.zeros_like(value))
            return "the child was let in"

        answer = in_child(use)
        assert answer.startswith("StoreRequestError: this store belongs to process"), answer
        assert in_child(lambda: str(store.close())) == "None"
        writing.wait()
        into = torch.zeros_like(value)
        store.read("x", into).wait()
        assert into.equal(value)


def test_a_child_makes_a_store_of_its_own(tmp_path: Path) -> None:
    def use() -> str:
        with Store(tmp_path, [("x", 5)]) as own:
            own.write("x", torch.ones(5, dtype=torch.uint8)).wait()
            into = torch.zeros(5, dtype=torch.uint8)
            own.read("x", into).wait()
            return str(into.tolist())

    with Store(tmp_path, [("x", SIZE)]) as store:
        store.write("x", torch.zeros(SIZE, dtype=torch.uint8)).wait()
        assert in_child(use) == "[1, 1, 1, 1, 1]"


def test_data_loader_workers_beside_a_store(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(64))
    with Store(tmp_path, [("x", SIZE)]) as store, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        value, into = torch.ones(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
        seen = []
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=8, num_workers=2):
            store.write("x", value)
            store.read("x", into).wait()
            seen += batch.tolist()
        assert seen == list(range(64))
        assert into.all()


def test_a_closed_store_frees_its_space(tmp_path: Path) -> None:
    store = Store(tmp_path, [("x", SIZE)])
    assert os.getpid() in holders(tmp_path)
    store.close()
    assert os.getpid() not in holders(tmp_path)
    with pytest.raises(StoreRequestError, match="closed"):
        store.write("x", torch.zeros(SIZE, dtype=torch.uint8))
