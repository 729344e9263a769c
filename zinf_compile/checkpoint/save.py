"""Saves a model and its optimizers while every rank writes what it has: nothing is gathered, a few pieces are in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError
from zinf_compile.optim.record import record_of
from zinf_compile.runtime.comm.ranks import Ranks

from .accumulated_gradients import add_gradients
from .gathered import agree_on_units, partitioned_parameters, plain, state_names
from .local_buffers import add_local_buffers
from .manifest import MANIFEST, write_json
from .random_states import add_random_states
from .rank_contents import RankContents
from .rank_files import RankFiles, check_space
from .save_folder import SaveFolder


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int = 1,
) -> Path:
    """Save a model, its optimizers and plain values in a new folder inside `folder`, and keep the last `keep` of these.

    A collective operation: all ranks call it after the same step, or between its micro-batches. Saved are parameters, buffers,
    gradients that are there (after a step, `zero_grad()` spares their space), states and settings of optimizers, and the random
    generators of each rank; an averaged model is saved as a part of `model`, as in an `nn.ModuleDict` of both.

    Each rank writes its own shards as safetensors, from where they live, with 32 MiB of them in memory. A process that is killed
    at any moment leaves the last save as it was, and the next save removes what it left. One job at a time saves to a folder.
    Returns the new folder. Raises `CheckpointError` naming a value of `extra`, or a setting, that is not plain, or a folder that
    another job saves to; `OSError` with errno and path. What is raised on one rank is raised on all, and nothing of the training
    is changed.
    """
    model = plain(model)
    unit = agree_on_units(partitioned_parameters(model), "saving a checkpoint", "")
    ranks = None if unit is None else unit.ranks
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    place = SaveFolder(Path(folder), keep=keep)
    contents = RankContents(rank, size)
    with _together(ranks, place.folder):
        names = contents.add_model(model)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for number, each in enumerate(optimizers):
            contents.add_optimizer("optimizer" if len(optimizers) == 1 else f"optimizer.{number}", each, names)
        add_gradients(contents, state_names(model))
    add_local_buffers(contents, state_names(model), ranks)
    add_random_states(contents, size, {tensor.device.type for tensor in state_names(model).values()})
    with _together(ranks, place.folder):
        contents.add_plain("extra", dict(extra or {}))
    if ranks is not None:
        ranks.agree(_lines(contents), what="saving a checkpoint")
    with contextlib.ExitStack() as ending:
        if rank == 0:
            ending.callback(place.abandon)
        with _together(ranks, place.folder):
            begun = place.begin() if rank == 0 else ("", "")
        partial, final = _share(ranks, begun, "naming a save")
        staging = place.folder / partial
        writer = ending.enter_context(contextlib.closing(RankFiles(staging, contents, rank)))
        size_of_all = _sum(ranks, writer.bytes)
        with _together(ranks, place.folder):
            if rank == 0:
                check_space(place.folder, size_of_all)
        with _together(ranks, place.folder):
            writer.allocate()  # nothing is written where there is too little space on any rank's drive
        with _together(ranks, place.folder):
            checksum = writer.write()
        checksums = (
            [checksum] if ranks is None else [int(value) for value in ranks.agree(["saved"], what="saving", value=checksum)]
        )
        with _together(ranks, place.folder):
            if rank == 0:
                write_json(staging / MANIFEST, {**_description(contents, size), "ranks": checksums})
                place.commit()
        for each in optimizers:
            record_of(each).checkpoint = str(place.folder / final)
        return place.folder / final


def _description(contents: RankContents, size: int) -> dict[str, Any]:
    return {
        "format": "zinf_compile checkpoint",
        "version": 1,
        "mesh": [{"axis": "shard", "size": size}],
        "tensors": {k: {"shape": t.shape, "dtype": str(t.dtype).removeprefix("torch.")} for k, t in contents.tensors.items()},
        "settings": contents.settings,
    }


def _lines(contents: RankContents) -> list[str]:
    """Return what ranks compare: all tensors but those of `extra`, which rank 0 saves its own of."""
    return [
        f"{key} {list(tensor.shape)} {tensor.dtype}" for key, tensor in contents.tensors.items() if not key.startswith("extra.")
    ]


def _share(ranks: Ranks | None, value: Any, what: str) -> Any:
    return value if ranks is None else ranks.share(value, what=what)


def _sum(ranks: Ranks | None, value: int) -> int:
    if ranks is None:
        return value
    return int(ranks.exchange(torch.tensor([value], dtype=torch.float64), what="space for a checkpoint").sum())


def _together(ranks: Ranks | None, folder: Path) -> contextlib.AbstractContextManager[None]:
    """Context whose errors are raised on all ranks; the others name the folder and the first rank that failed."""
    if ranks is None:
        return contextlib.nullcontext()
    return ranks.fail_together(
        "saving a checkpoint", elsewhere=lambda told: CheckpointError(f"no checkpoint is saved in {folder}: {told}")
    )
