"""Saves a model and its optimizers while every rank writes what it has: nothing is gathered, a few pieces are in memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.storage.engine import Engine, crc32c

from .accumulated_gradients import add_gradients
from .file_layout import Part, lay_out
from .gathered import agree_on_units, partitioned_parameters, plain, state_names
from .local_buffers import add_local_buffers
from .manifest import MANIFEST, partial_name, rank_manifest, saved_name, saves_in, write_json
from .parts_writer import PartsWriter, StagingBuffers
from .random_states import add_random_states
from .rank_contents import RankContents
from .shard_parts import ShardPart

_STAGING_COUNT, _STAGING_BYTES = 4, 8 << 20


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int = 1,
) -> Path:
    """Save a model, its optimizers and plain values in a new folder inside `folder`, and keep the last `keep` of these.

    A collective operation: all ranks call it after the same step. Each rank writes its own shards as safetensors, from where they
    live, with 32 MiB of them in memory. A process that is killed at any moment leaves the last save as it was. Returns the new
    folder. Raises `CheckpointError` naming a value of `extra`, or a setting, that is not plain, `OSError` with errno and path.
    """
    model = plain(model)
    unit = agree_on_units(partitioned_parameters(model), "saving a checkpoint", "")
    ranks = None if unit is None else unit.ranks
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    contents = RankContents(rank, size)
    names = contents.add_model(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    for number, each in enumerate(optimizers):
        contents.add_optimizer("optimizer" if len(optimizers) == 1 else f"optimizer.{number}", each, names)
    add_gradients(contents, state_names(model))
    add_local_buffers(contents, state_names(model), ranks)
    add_random_states(contents, rank, size)
    contents.add_plain("extra", dict(extra or {}))
    target = Path(folder)
    number = _share(ranks, 1 + max(saves_in(target), default=-1) if rank == 0 else 0, "numbering a save")
    token = _share(ranks, secrets.token_hex(8), "naming a save")
    staging = target / partial_name(number, token)
    with _together(ranks, "saving a checkpoint"):
        if rank == 0:
            staging.mkdir(parents=True)
    try:
        with _together(ranks, "saving a checkpoint"):
            checksum = _write_rank(staging, contents, rank)
        checksums = (
            [checksum] if ranks is None else [int(value) for value in ranks.agree(["saved"], what="saving", value=checksum)]
        )
        final = target / saved_name(number)
        with _together(ranks, "saving a checkpoint"):
            if rank == 0:
                write_json(staging / MANIFEST, {**_description(contents, size), "ranks": checksums})
                _sync(staging)
                staging.rename(final)
                _sync(target)
                for older in sorted(saves_in(target))[:-keep]:
                    shutil.rmtree(target / saved_name(older))
    finally:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
    return final


def _write_rank(folder: Path, contents: RankContents, rank: int) -> int:
    """Write what a rank has; return the checksum of its manifest."""
    layouts = lay_out({key: (t.dtype, [part.rectangle for part in t.parts]) for key, t in contents.tensors.items()})
    staging = StagingBuffers(_STAGING_COUNT, _STAGING_BYTES)
    with Engine() as engine:
        names = [f"rank-{rank:05}-{number:04}.safetensors" for number in range(len(layouts))]
        writers = [PartsWriter(folder / name, layout, engine, staging) for name, layout in zip(names, layouts, strict=True)]
        try:
            _write_values(contents, writers)
            checksums = {name: writer.finish() for name, writer in zip(names, writers, strict=True)}
        finally:
            for writer in writers:
                writer.abandon()
    described = {
        name: {part.key: _described(part, checksums[name][part.key]) for part in layout.parts}
        for name, layout in zip(names, layouts, strict=True)
    }
    text = write_json(folder / rank_manifest(rank), described)
    return crc32c(text)


def _described(part: Part, checksums: Sequence[int]) -> dict[str, Any]:
    rectangle = part.rectangle
    return {"offsets": rectangle.offsets, "sizes": rectangle.sizes, "begin": part.begin, "crc32c": checksums}


def _write_values(contents: RankContents, writers: Sequence[PartsWriter]) -> None:
    places: dict[str, list[tuple[ShardPart, PartsWriter, Part]]] = {key: [] for key in contents.tensors}
    for writer in writers:
        for part in writer.layout.parts:
            places[part.key].append((contents.tensors[part.key].parts[len(places[part.key])], writer, part))
    collected: dict[str, list[torch.Tensor]] = {}
    """Of parts whose elements are written in another order than they come in."""
    for key, start, values in contents.values():
        for shard_part, writer, part in places[key]:
            first = max(start, shard_part.start)
            last = min(start + values.numel(), shard_part.start + part.rectangle.numel)
            if first >= last:
                continue
            piece = values[first - start : last - start]
            if shard_part.order is None:
                writer.write(part, first - shard_part.start, piece)
                continue
            kept = collected.setdefault(key, [])
            kept.append(piece.clone())
            if last == shard_part.start + part.rectangle.numel:  # a shard's pieces come in order
                writer.write(part, 0, shard_part.rearranged(torch.cat(collected.pop(key))))


def _description(contents: RankContents, size: int) -> dict[str, Any]:
    return {
        "format": "zinf_compile checkpoint",
        "version": 1,
        "mesh": [{"axis": "shard", "size": size}],
        "tensors": {k: {"shape": t.shape, "dtype": str(t.dtype).removeprefix("torch.")} for k, t in contents.tensors.items()},
        "settings": contents.settings,
    }


def _share(ranks: Ranks | None, value: Any, what: str) -> Any:
    return value if ranks is None else ranks.share(value, what=what)


def _together(ranks: Ranks | None, what: str) -> Any:
    return contextlib.nullcontext() if ranks is None else ranks.fail_together(what)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
