"""Saves that end in the middle: at a system call of any number, by a process that dies there or by an error."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CALLS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "close")
"""What a save does to its folder by."""


@contextlib.contextmanager
def counting(act: Callable[[int, str, tuple[Any, ...]], object]) -> Iterator[None]:
    """Call `act` with number, name and arguments before each system call of a save."""
    count = 0
    really = {name: getattr(os, name) for name in CALLS}

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            number, count = count, count + 1
            act(number, name, args)
            return really[name](*args, **kwargs)

        return call

    gc.collect()  # files that an earlier save has left open are closed now, and not among the calls
    gc.disable()
    for name in CALLS:
        setattr(os, name, watched(name))
    try:
        yield
    finally:
        for name, function in really.items():
            setattr(os, name, function)
        gc.enable()


class Dying:
    """From the system call of some number on, none reaches the drive, as of a process that was killed as it began."""

    def __init__(self, number: int) -> None:
        self.number, self.dead = number, False

    def __call__(self, at: int, name: str, args: tuple[Any, ...]) -> None:
        if at >= self.number and name != "close":
            self.dead = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def killed_at(number: int, save: Callable[[], object]) -> bool:
    """Save in a process that is killed as it begins the system call of this number; return whether it got so far."""

    def die(at: int, _name: str, _args: tuple[Any, ...]) -> None:
        if at == number:
            os._exit(9)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            with counting(die):
                save()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), "it is saved, or killed"
    return code == 9


def entries(folder: Path) -> dict[str, bytes]:
    """Return all that a folder holds, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
