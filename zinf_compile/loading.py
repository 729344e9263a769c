"""A checkpoint's values into a model being born: of each parameter, each rank reads its own range."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import os
import re
from collections.abc import Sequence

import torch
from torch import nn

from .checkpoint import state_names
from .errors import CheckpointError
from .newborn import Newborn, Nursery
from .runtime import chunks
from .runtime.context import Context
from .runtime.home import DriveHome
from .runtime.lanes import Pending, wait_for_all
from .runtime.unit import Unit
from .tensor_files import TensorFiles

_PIECES_ON_THE_WAY = 3
"""Written while the next is read."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Files that were found to fit a model."""

    files: TensorFiles
    names: dict[int, str]
    """By the identity of a parameter, the name under which its value is stored; of several the last, as if loaded whole."""

    def close(self) -> None:
        """Close the files."""
        self.files.close()


def open_files(model: nn.Module, path: str | os.PathLike[str], context: Context) -> Checkpoint:
    """Open a checkpoint for a model on meta; raise `CheckpointError` on all ranks, naming everything that doesn't fit."""
    files, stored, problems = None, {}, []
    try:
        files = TensorFiles(path)
        targets = state_names(model)
        stored = {id(tensor): name for name, tensor in targets.items() if name in files.tensors}
        patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None)  # what a model of transformers has no use for
        problems = files.check(
            {name: (tensor, id(tensor) in stored) for name, tensor in targets.items()},
            ignored=re.compile("|".join(patterns)) if patterns else None,
        )
    except CheckpointError as error:
        problems = [str(error)]
    counts = context.agree(["opening a checkpoint"], what="opening a checkpoint", value=float(len(problems)))
    bad = [rank for rank, count in enumerate(counts) if count]
    if files is None or bad:
        if files is not None:
            files.close()
        listed = "; ".join(problems) or f"named on rank {bad[0]}"
        raise CheckpointError(f"checkpoint {path} doesn't fit the model, which is on meta as before: {listed}")
    return Checkpoint(files, stored)


def load_values(
    model: nn.Module, checkpoint: Checkpoint, newborns: Sequence[Newborn], units: Sequence[Unit], nursery: Nursery
) -> None:
    """Bring parameters and buffers from the files to where they are kept, one after the other."""
    for newborn, unit in zip(newborns, units, strict=True):
        name = checkpoint.names[id(newborn)]
        if newborn.is_contiguous():
            nursery.forget(newborn)
            _load_range(checkpoint.files, name, unit)
        else:
            whole = nursery.whole(newborn, fills=True)
            whole.copy_(_read(checkpoint.files, name, whole.shape, whole.dtype))
        newborn._zinf_birth.filled = newborn._zinf_birth.kept = True
    for prefix, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            if buffer is not None and attribute not in module._non_persistent_buffers_set and name in checkpoint.files.tensors:
                buffer.copy_(_read(checkpoint.files, name, buffer.shape, buffer.dtype))


def _load_range(files: TensorFiles, name: str, unit: Unit) -> None:
    """Read this rank's elements; to a drive piece by piece, one being read while those before it are written."""
    places = [stretch.place for stretch in unit.stretches]
    if not isinstance(unit.home, DriveHome):
        shard = unit.blank()
        host = torch.zeros(unit.shard_numel, dtype=unit.dtype)
        for place, (start, end) in zip(places, unit.held, strict=True):
            files.read(name, host[place : place + end - start], start=start)
        unit.save(shard.copy_(host))
        return
    writing: collections.deque[Pending] = collections.deque()
    try:
        for first, last in chunks.cut_pieces(unit.shard_numel, piece_numel=chunks.PIECE_NUMEL, cuts=unit.cuts):
            piece = unit.context.bridge.host_buffer(last - first, unit.dtype)
            stretch = bisect.bisect(places, first) - 1
            start, end = unit.held[stretch]
            start += first - places[stretch]
            valid = max(0, min(last - first, end - start))
            files.read(name, piece[:valid], start=start)
            piece[valid:].zero_()
            if len(writing) == _PIECES_ON_THE_WAY:
                writing.popleft().wait()
            writing.append(unit.home.write_piece(first, piece))
    finally:
        wait_for_all(pending.wait for pending in writing)


def _read(files: TensorFiles, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
    files.read(name, flat)
    return flat.view(shape)
