"""The whole of `zinf doctor --gpu-selftest`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zinf_compile.cli import gpu_selftest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def test_no_check_fails(tmp_path: Path) -> None:
    text, passed = gpu_selftest.report(str(tmp_path))
    print(text)
    assert passed, text
