"""Every test, or every module that says so, starts with nothing compiled; a passed GPU run is written into the README."""

from __future__ import annotations

import gc
import getpass
import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

gc.disable()  # while tests and what they import are read: nothing of it ever goes

import gpu_record  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from heap import collect_less, settle  # noqa: E402
from hypothesis import settings  # noqa: E402
from quick_compile import compile_quickly, link_quickly  # noqa: E402

from zinf_compile.runtime import context  # noqa: E402

_ROOT = Path(__file__).parent.parent
_KEEPER = pytest.StashKey[str]()
"""Name of the module whose graphs are kept."""

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")
if os.environ.get("ATEN_CPU_CAPABILITY"):  # Inductor's cache would run code there that was compiled for other vectors
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = (
        f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    )
compile_quickly()
link_quickly()
logging.getLogger("torch.__trace").propagate = True  # or pytest listens, and PyTorch describes each compilation in detail


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=1, help="threads that PyTorch computes with (default 1)")


def pytest_configure(config: pytest.Config) -> None:
    """By default on one thread: models are tiny, and threads that wait for each other cost most of the time on a busy machine."""
    torch.set_num_threads(config.getoption("--threads"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/device to processes of its own, `make test-device`: a process has one device for as long as it lives."""
    device = _ROOT / "tests" / "device"
    if collection_path != device or any(
        device in (asked := Path(arg.split("::")[0]).resolve(), *asked.parents) for arg in config.args
    ):
        return None
    return True


@pytest.fixture(scope="module", autouse=True)
def _settled_heap() -> None:
    """Let the garbage collector leave alone what libraries have imported and kept since; a module's models are made later."""
    torch.compiler.reset()
    settle()


@pytest.fixture(autouse=True)
def _fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start with nothing compiled: each test, or each module where it is marked `keeps_graphs`."""
    keeper = request.node.module.__name__ if request.node.get_closest_marker("keeps_graphs") else ""
    if not keeper or request.session.stash.get(_KEEPER, "") != keeper:
        torch.compiler.reset()
        context._contexts.clear()  # what an earlier test left alive counts against no cap, and moves no bytes of this one
    elif keeper:
        gc.collect()  # the account of memory is kept, too: what an earlier test left leaves it now, not at any moment
    request.session.stash[_KEEPER] = keeper
    seeding = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seeding(0)  # without a device the former formats the stack for each kind that there could be, a millisecond a test
    yield
    if not keeper:
        torch.compiler.reset()


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for all tests of a module: graphs are kept from one to the next only where options are the same."""
    return tmp_path_factory.mktemp("drive")


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Lightning, which replaces `torch.compile` where it is imported: for this test alone, not for all that come after."""
    monkeypatch.setattr(torch, "compile", torch.compile)
    return pytest.importorskip("lightning")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the garbage collector leave alone what was imported, for as long as the tests run, and look less often at the rest."""
    gc.freeze()
    collect_less()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Record a run of all tests of tests/gpu in which every one passed on a device."""
    if hasattr(config, "workerinput") or not torch.cuda.is_available():
        return  # a process of pytest-xdist knows only its own share of the tests
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True, check=False)
    line = gpu_record.line(
        terminalreporter.stats,
        exitstatus,
        files=(_ROOT / "tests" / "gpu").glob("test_*.py"),
        run=(commit.stdout.strip() or "unknown commit", torch.cuda.get_device_name()),
    )
    if line is not None:
        gpu_record.write(line, _ROOT / "README.md")
        terminalreporter.write_line(line)
