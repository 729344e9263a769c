"""A model whose states don't fit within a process's cap trains, to the bits of the same with all in memory."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
CAP = 5 << 28
"""1.25 GiB: the states alone are 2.5 GiB."""


def load(name: str) -> ModuleType:
    """Import a file of benchmarks/."""
    spec = importlib.util.spec_from_file_location(name, HERE.parent / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def digest(folder: Path) -> list[str]:
    """Return what the saved files hold, by name."""
    return [f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in sorted(folder.glob("*.safetensors"))]


@pytest.mark.slow
def test_states_of_nearly_twice_the_cap(tmp_path: Path) -> None:
    folders = [tmp_path / "nvme", tmp_path / "memory"]
    for folder in folders:
        folder.mkdir()
    program = [sys.executable, str(HERE / "capped_program.py")]
    watched = load("_watch").watch([[*program, "nvme", str(folders[0]), str(CAP)]], cap=CAP, folder=str(folders[0]), seconds=240)
    assert not watched.why, watched.why
    assert watched.peak_bytes <= CAP
    assert watched.drive_bytes > 1.9 * CAP
    whole = subprocess.run([*program, "memory", str(folders[1]), "0"], check=True, capture_output=True, text=True)
    losses = json.loads(whole.stdout)
    assert json.loads(watched.lines[-1]) == losses
    assert losses[2] < losses[0]
    assert digest(folders[0]) == digest(folders[1])
    assert len(digest(folders[0])) > 2
    assert not any(name.startswith(".") for name in os.listdir(folders[0]))
