"""Drives of some megabytes, mounted for a test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import zinf_compile

MIB = 1 << 20


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """Mount something at `folder`; skip the test where that is not allowed. At the end nobody may have anything open there."""
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", *arguments, folder], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        yield folder
    finally:
        if subprocess.run(["umount", folder], check=False).returncode:
            subprocess.run(["umount", "-l", folder], check=True)  # or it stays for good
            raise AssertionError(f"something in {folder} is still open")


@contextmanager
def small_drive(folder: Path, size: int) -> Iterator[Path]:
    """Mount a drive of `size` bytes at `folder`, made of memory; what this process holds there is let go at the end."""
    with mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as drive:
        try:
            yield drive
        finally:
            zinf_compile.reset()


def free_bytes(folder: Path) -> int:
    """Return the bytes free on the drive of a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def fill(folder: Path, leave: int = 0) -> Path:
    """Fill the drive of a folder with one file, but for some bytes; return the file."""
    file = folder / "other"
    size = free_bytes(folder) - leave
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, size)
    return file
