"""The device `late` is compiled at first use, a minute on one core, and kept in build/device.

In processes of its own: PyTorch has one device for the whole process, and its autograd threads start with the first backward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import late  # noqa: E402


@pytest.fixture(autouse=True)
def _clean_device() -> Iterator[None]:
    """Start with nothing counted, end with nothing running."""
    torch.accelerator.synchronize()
    late.clear()
    late.reset_peak()
    yield
    torch.accelerator.synchronize()
