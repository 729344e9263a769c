"""A test in this folder compiles nothing and starts no process: trying to fails, wherever it happens."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

_STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "subprocess.Popen"}
_HERE = Path(__file__).parent
_guarded = False


class NotAUnitTestError(AssertionError):
    """A test of tests/unit does what belongs into another folder."""


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if _guarded and event in _STARTS:
        raise NotAUnitTestError(f"{event}{arguments[:1]} in tests/unit: move the test to tests/e2e, tests/ranks or tests/faults")


def _refuse_compiling(*_: Any, **__: Any) -> Any:
    raise NotAUnitTestError("torch.compile in tests/unit: take the graph from `tracing.traced`, or move the test to tests/e2e")


sys.addaudithook(_refuse_processes)  # hooks stay for good; this one acts while a unit test runs


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker("unit")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Guard a test with its fixtures, those of its module too. Called for tests of other folders as well."""
    global _guarded  # noqa: PLW0603
    if not item.path.is_relative_to(_HERE):
        return (yield)
    refused = mock.patch.multiple(torch, compile=_refuse_compiling)
    spawning = mock.patch("multiprocessing.util.spawnv_passfds", _refuse_spawning)
    with refused, spawning:
        _guarded = True
        try:
            return (yield)
        finally:
            _guarded = False


def _refuse_spawning(*_: Any, **__: Any) -> Any:
    raise NotAUnitTestError("multiprocessing in tests/unit: move the test to tests/e2e, tests/ranks or tests/faults")
