"""What PyTorch does at each compilation and nobody here uses, left out: 5 % or more of the time that a compilation takes."""

from __future__ import annotations

import linecache
import sysconfig
from typing import Any

import torch
from paths import ROOT
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._dynamo import guards
from torch._functorch._aot_autograd import graph_compile

_UNCHANGING = (sysconfig.get_path("stdlib"), str(ROOT), *torch.__path__)
_check_cache = linecache.checkcache
_reset_random = PhiloxStateTracker.reset


def compile_quickly() -> None:
    """Leave it out in this process, where the version of PyTorch has it.

    Dynamo times the guards of each graph for its log, and empties the processor's caches before. AOTAutograd prints each graph
    whether or not its log is on, and begins to follow Philox's states whether or not they are asked for. A fake mode formats
    the stack, for which each file of it is looked up on the drive, in case that it has changed.
    """
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = _not_timed
    if hasattr(graph_compile, "_log_joint_graph") and hasattr(graph_compile, "_log_fw_bw_graphs"):
        graph_compile._log_joint_graph = _not_printed
        graph_compile._log_fw_bw_graphs = _neither_printed
    PhiloxStateTracker.reset = _not_followed  # type: ignore[method-assign]
    linecache.checkcache = _check_what_may_change


def _not_timed(*_: Any) -> float:
    return 0.0


def _not_printed(*_: Any) -> None:
    return None


def _neither_printed(*_: Any) -> tuple[None, None]:
    return None, None


def _not_followed() -> None:
    if torch._functorch.config.functionalize_rng_ops:
        _reset_random()


def _check_what_may_change(filename: str | None = None) -> None:
    if filename is None or not filename.startswith(_UNCHANGING):
        _check_cache(filename)
