"""Compiles the device once for each PyTorch, compiler and state of its sources: a minute of one core.

What was compiled is kept in build/device.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_SOURCES = Path(__file__).parent / "csrc"
_KEPT = Path(__file__).parents[3] / "build" / "device"
_TORCH = Path(torch.__file__).parent
_FLAGS = [
    "-std=c++20",
    "-O1",
    "-DNDEBUG",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",
    "-Wno-unused-parameter",
    "-Wno-stringop-overflow",  # of GCC 12, in PyTorch's headers
    "-pthread",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
]


def build() -> Path:
    """Return the path of the compiled device; compile first what nobody has. Two processes at a time compile it once."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"tests/device compiles a device for PyTorch and found no C++ compiler {compiler!r}; set CXX to one of C++20"
        )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    tools = f"{torch.__version__} {sysconfig.get_python_version()} {version} {_FLAGS}"
    objects = {source: _KEPT / f"{source.stem}-{_key(tools, *_read_by(source))}.o" for source in sorted(_SOURCES.glob("*.cpp"))}
    library = _KEPT / f"late-{_key(tools, *objects.values())}.so"
    _KEPT.mkdir(parents=True, exist_ok=True)
    with open(_KEPT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, {source: into for source, into in objects.items() if not into.exists()})
            libraries = [f"-L{_TORCH}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_TORCH}/lib"]
            _run([compiler, "-shared", "-pthread", *map(str, objects.values()), *libraries], library)
    return library


def _key(*parts: str | Path) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part.read_bytes() if isinstance(part, Path) and part.suffix in (".cpp", ".hpp") else str(part).encode())
    return state.hexdigest()[:16]


def _read_by(source: Path) -> list[Path]:
    """Return a source and the headers of ours that it includes, and those that they include."""
    found = [source]
    for file in found:
        for name in re.findall(r'^#include "(.*)"', file.read_text(), re.MULTILINE):
            if _SOURCES / name not in found:
                found.append(_SOURCES / name)
    return found


def _compile(compiler: str, missing: dict[Path, Path]) -> None:
    includes = [f"-I{_SOURCES}", "-isystem", f"{_TORCH}/include", "-isystem", sysconfig.get_paths()["include"]]
    longest_first = sorted(missing, key=lambda source: source.stem not in ("operators", "autocast", "fallback"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source: _run([compiler, *_FLAGS, *includes, "-c", str(source)], missing[source]), longest_first))


def _run(command: list[str], into: Path) -> None:
    unfinished = into.with_suffix(".unfinished")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"compiling the device for tests failed: {' '.join(command)}\n{done.stderr}")
    unfinished.rename(into)
