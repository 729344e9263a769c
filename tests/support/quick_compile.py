"""What PyTorch does at each compilation and nobody here uses, left out."""

from __future__ import annotations

import contextlib
import linecache
import os
import shutil
import sysconfig
from typing import Any

import torch
from paths import ROOT
from torch._dynamo import guards

_UNCHANGING = (sysconfig.get_path("stdlib"), str(ROOT), *torch.__path__)
_check_cache = linecache.checkcache


def compile_quickly() -> None:
    """Leave it out in this process, where the version of PyTorch has it.

    Dynamo times the guards of each graph for its log, and empties the processor's caches before. A fake mode formats the stack,
    for which each file of it is looked up on the drive, in case that it has changed.
    """
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = _not_timed
    linecache.checkcache = _check_what_may_change
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):
        torch._dynamo.config.side_effect_replay_policy = "silent"


def link_quickly() -> None:
    """Let the C++ compiler of this process and of those that it starts link with gold, where gold is installed.

    Of the 0.7 CPU seconds that a kernel of Inductor's takes, GNU ld takes 0.15: it reads all symbols of PyTorch.
    """
    gold = shutil.which("ld.gold")
    if gold is None:
        return
    linker = ROOT / "build" / "gold" / "ld"
    with contextlib.suppress(OSError):  # it is there already, or nothing may be written here
        linker.parent.mkdir(parents=True, exist_ok=True)
        linker.symlink_to(gold)
    searched = filter(None, [str(linker.parent), os.environ.get("COMPILER_PATH")])
    os.environ["COMPILER_PATH"] = os.pathsep.join(dict.fromkeys(searched))


def _not_timed(*_: Any) -> float:
    return 0.0


def _check_what_may_change(filename: str | None = None) -> None:
    if filename is None or not filename.startswith(_UNCHANGING):
        _check_cache(filename)
