"""A drive that doesn't answer is named in a warning, then in an error; nothing waits for ever, the process's end included."""

from __future__ import annotations

import errno
import logging
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from engines import ENGINES
from models import Mlp, vectors
from paths import SUPPORT
from programs import run_program
from stuck_drive import StuckNative
from tiers import context_of

from zinf_compile.errors import StoreError, StoreWarning
from zinf_compile.runtime.storage import stalls
from zinf_compile.runtime.storage.engine import Engine, File, _close
from zinf_compile.runtime.storage.extent_store import Store

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:states are kept in")]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "PATIENCE_S", 0.1)


@pytest.mark.parametrize("aligned", [True, False])
def test_a_warning_then_an_error_that_name_the_folder(aligned: bool, tmp_path: Path) -> None:
    engine = Engine(timeout_s=0.5)
    value = torch.arange(9000 + 4096, dtype=torch.int32).to(torch.uint8)
    value = value[-value.data_ptr() % 4096 + (0 if aligned else 1) :][:8192]
    store = Store(tmp_path, [("x", 8192), ("y", 8192)], engine=engine, block_bytes=4096)
    store.write("x", value).wait()
    drive = StuckNative(engine)
    reading = store.read("x", into := torch.zeros(8193, dtype=torch.uint8)[1:])
    warning = rf"{tmp_path}.* has not answered for .*waiting for a read of .*timeout_s"
    error = r"cannot read bytes .* of extent 'x' .*has not answered for 0.5 s"
    with pytest.warns(StoreWarning, match=warning) as said, pytest.raises(StoreError, match=error) as raised:
        reading.wait()
    assert (raised.value.errno, raised.value.filename) == (errno.ETIMEDOUT, str(tmp_path))
    assert len(said) == 1, "one for each standstill"
    assert store.staging.bytes == sum(buffer.numel() for buffer in store.staging._idle), "a late answer meets no buffer in use"
    begun = time.monotonic()
    with pytest.raises(StoreError, match="has not answered"):
        store.write("y", value).wait()
    assert time.monotonic() - begun < 0.4, "no second wait"
    drive.answered.set()
    store.write("y", value).wait()
    store.read("x", into).wait()
    assert torch.equal(into, value), "it goes on where the drive does"
    store.close()
    engine.close()


def test_as_long_as_anything_moves_there_is_no_error(tmp_path: Path) -> None:
    engine = Engine(timeout_s=0.5)
    drive = StuckNative(engine)

    def trickle() -> None:
        for _ in range(30):
            time.sleep(0.05)
            drive.progress += 1
        drive.answered.set()

    with File(tmp_path / "data", write=True) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)  # a busy machine may stand still for that long
        thread = threading.Thread(target=trickle)
        request = engine.write(file, 0, b"slow")
        thread.start()
        request.wait()
        thread.join()
    engine.close()


def test_closing_says_so_and_dropping_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(timeout_s=0.2)
    drive = StuckNative(engine)
    with File(tmp_path / "data", write=True) as file:
        engine.write(file, 0, b"nobody waits for it")
    with pytest.raises(TimeoutError, match=r"has not answered for 0\.2 s"):
        engine.close()
    with caplog.at_level(logging.ERROR, "zinf_compile"):
        _close(engine._native, engine._held, engine._watch)  # as where nobody refers to it any more
    assert "the process goes on without" in caplog.text
    drive.answered.set()


@pytest.mark.parametrize("name", ENGINES)
def test_a_process_ends_with_a_drive_that_does_not_answer(name: str, tmp_path: Path) -> None:
    """While a lane's worker waits for it, and a transfer that nobody waits for is under way too."""
    script = f"""
        import sys; sys.path.insert(0, {str(SUPPORT)!r})
        import time, torch
        from models import Mlp, vectors
        from stuck_drive import StuckNative
        from zinf_compile.runtime.storage.engine import Engine, File
        from zinf_compile.runtime.lanes.lanes import ThreadLane
        lane = ThreadLane("zinf-test")
        engine = Engine({name!r})
        StuckNative(engine)
        file = File({str(tmp_path / "data")!r}, write=True)
        first, second = engine.write(file, 0, b"x"), engine.write(file, 8192, b"y")
        lane.submit(first.wait)
        time.sleep(0.1)
        print("trained", flush=True)
    """
    begun = time.monotonic()
    done = run_program(textwrap.dedent(script))
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert time.monotonic() - begun < 90


def test_a_forward_names_the_parameter_and_the_folder(tmp_path: Path) -> None:
    model = Mlp()
    options = {"params": "nvme", "nvme": str(tmp_path), "compute": "fx", "timeout_s": 5.0}
    model.compile(backend="zero_infinity", options=options)
    expected = model(*(inputs := vectors(0))).detach()
    engine = context_of(model).engine
    assert engine.timeout_s == 5.0
    drive = StuckNative(engine)
    with pytest.warns(StoreWarning, match="has not answered"), pytest.raises(StoreError, match=r"parameter \w+\.") as raised:
        model(*inputs)
    assert (raised.value.errno, raised.value.filename) == (errno.ETIMEDOUT, str(tmp_path))
    drive.answered.set()
    assert torch.equal(model(*inputs), expected)
