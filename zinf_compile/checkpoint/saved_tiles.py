"""Tiles that a graph has cut for a cap, saved with the parameters that have them, and made again before a load.

Note: Tiles of a training that goes on
    A graph that doesn't fit within `device_memory` cuts its parameters into smaller tiles than those that follow from it. Once an
    optimizer's states were loaded nothing may be cut any more. A training that goes on with the same options is partitioned as
    the first one was before its first graph: so a load cuts the parameters, before anything of them is there, as that graph did.
    Where they were made with other tiles than then, by another cap or by option `tile`, they keep theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from zinf_compile.errors import OptionError
from zinf_compile.ir.compute_shape import LEAST_PIECE_NUMEL
from zinf_compile.optim.unused import are_unused
from zinf_compile.runtime.units.recut import recut
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import unit_of


def describe_tiles(units: Mapping[str, Unit]) -> list[dict[str, Any]]:
    """Return as JSON which parameters a graph has cut into smaller tiles than by default, and into which; `units` by name."""
    alike: dict[tuple[int, int, int], list[str]] = {}
    for name, unit in units.items():
        if unit.smaller_tile is not None:
            alike.setdefault((*unit.smaller_tile, unit.placement.piece_numel), []).append(name)
    return [
        {"default": default, "tile": tile, "piece_numel": piece, "parameters": names}
        for (default, tile, piece), names in alike.items()
    ]


def cut_as_saved(described: Iterable[Mapping[str, Any]], targets: Mapping[str, torch.Tensor], *, empty: bool) -> None:
    """Cut a model's parameters as those of a checkpoint, see Note: Tiles of a training that goes on.

    `targets`: its tensors by name; `empty`: no values are there yet. On several ranks nothing is cut: they keep what `partition`
    has made. Values stay what they are, for a load that is refused behind this. Raises `StoreError` before anything is changed.
    """
    for group in described:
        default, tile = group["default"], group["tile"]
        named = [targets[name] for name in group["parameters"] if name in targets]
        found = {id(unit): unit for tensor in named if (unit := unit_of(tensor)) is not None}
        units = [unit for unit in found.values() if unit.placement.tile == default or not (unit.shape and unit.numel)]
        if not units or any(unit.shard_group.size > 1 for unit in units) or not are_unused(named):
            continue
        least = max(LEAST_PIECE_NUMEL, group["piece_numel"])  # smaller ones were asked for, and stay what they are
        with contextlib.suppress(OptionError):  # more tiles than a graph takes: no graph has had them
            recut(units, tile, min(least, *(unit.placement.piece_numel for unit in units)), empty=empty)
            for unit in units:
                unit.smaller_tile = default, tile
