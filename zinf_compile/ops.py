"""The intermediate representation: four operators that say what moves, and when.

| operator                                  | meaning                                                                 |
|-------------------------------------------|-------------------------------------------------------------------------|
| `zinf::all_gather(unit, group, dtype=)`   | shards of all ranks -> full unit; starts the transfer, returns a handle |
| `zinf::wait(handle)`                      | the full unit, usable after this node                                   |
| `zinf::release(full)`                     | this graph needs the full unit no longer                                |
| `zinf::reduce_scatter(grad, unit, group)` | full gradient -> averaged shard; starts it, returns a gradient handle   |

`unit` is the hollow parameter itself: it has the logical shape and holds no bytes. `group` numbers the transfers that are
issued together (-1: alone). With a `dtype`, shards are cast to that narrower type before they travel, and the full unit is of
it. Handles and results have the logical shape of the parameter, so that the graph type-checks as if nothing were partitioned.

The kernels registered here are what the operators mean on one process, where a shard is the whole: a scheduled graph can so be
run as plain FX, which is how tests compare numbers before and after a pass. In training the executor of
`zinf_compile.runtime` performs the schedule instead and never dispatches these operators.
"""

from __future__ import annotations

import torch
from torch.library import Library

LONE_GROUP = -1
"""Group number of a transfer that is issued alone."""

_library = Library("zinf", "DEF")
_library.define("all_gather(Tensor unit, int group=-1, *, ScalarType? dtype=None) -> Tensor")
_library.define("wait(Tensor handle) -> Tensor")
_library.define("release(Tensor full) -> ()")
_library.define("reduce_scatter(Tensor grad, Tensor unit, int group=-1) -> Tensor")


def _all_gather(unit: torch.Tensor, group: int = LONE_GROUP, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(unit.size(), unit.stride(), dtype=dtype or unit.dtype, device=unit.device).copy_(unit)


def _wait(handle: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(handle.size(), handle.stride(), dtype=handle.dtype, device=handle.device).copy_(handle)


def _release(full: torch.Tensor) -> None:
    return None


def _reduce_scatter(grad: torch.Tensor, unit: torch.Tensor, group: int = LONE_GROUP) -> torch.Tensor:
    return grad.clone()


for _name, _kernel in (
    ("all_gather", _all_gather),
    ("wait", _wait),
    ("release", _release),
    ("reduce_scatter", _reduce_scatter),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")

all_gather = torch.ops.zinf.all_gather.default
wait = torch.ops.zinf.wait.default
release = torch.ops.zinf.release.default
reduce_scatter = torch.ops.zinf.reduce_scatter.default

SCHEDULE_OPS = frozenset({all_gather, wait, release, reduce_scatter})
"""What the executor performs itself; everything else in a graph is compute."""
