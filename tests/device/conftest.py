"""The device `late` is compiled at first use, a minute on one core, and kept in build/device.

In processes of its own: PyTorch has one device for the whole process, and its autograd threads start with the first backward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

sys.path.insert(0, str(Path(__file__).parent))

import late
from rank_late import watched_drives


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let a touch of device memory say so where pytest's own traceback of it goes, past what captures standard error."""
    late.fault_output(config.stash.get(fault_handler_stderr_fd_key, 2))


@pytest.fixture(autouse=True)
def _clean_device() -> Iterator[None]:
    """Start with nothing counted, end with nothing running; what drives do is watched."""
    torch.accelerator.synchronize()
    late.clear()
    late.reset_peak()
    with watched_drives():
        yield
    torch.accelerator.synchronize()
