"""A checkpoint's values into a model that is being partitioned: of each parameter, each rank reads its own range."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Sequence

import torch
from torch import nn

from zinf_compile.checkpoint.checkpoint_files import Reading
from zinf_compile.checkpoint.gathered import state_names
from zinf_compile.checkpoint.intake import DType, Rename
from zinf_compile.checkpoint.model_files import ModelFiles, open_model_files
from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.units.backing import NvmeBacking
from zinf_compile.runtime.units.unit import Unit

from .materializer import Materializer
from .materializing import MaterializingParameter
from .shard_writer import BYTES_ON_THE_WAY, Piece, PieceWriter, pieces_of

_BYTES_AHEAD = 16 << 20
"""The most bytes read ahead while the piece before them is copied to its buffer; one piece at least."""

_MOST_ROOM_BYTES = BYTES_ON_THE_WAY + 2 * _BYTES_AHEAD
"""Of buffers for that; no more than this is in use, so that what is beyond is of sizes that were needed before."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Files that were found to fit a model."""

    files: ModelFiles
    names: dict[int, str]
    """By the identity of a parameter, the name under which its value is stored; of several the last, as if loaded whole."""

    def close(self) -> None:
        """Close the files."""
        self.files.close()


def open_files(
    model: nn.Module,
    path: str | os.PathLike[str],
    context: Context,
    *,
    dtype: DType | None = None,
    rename: Rename | None = None,
) -> Checkpoint:
    """Open a checkpoint for a model on meta; raise `CheckpointError` on all ranks, naming everything that doesn't fit."""
    files, stored, problems = None, {}, []
    try:
        targets = state_names(model)
        files = open_model_files(path, targets, dtype=dtype, rename=rename)
        stored = {id(tensor): name for name, tensor in targets.items() if name in files.tensors}
        patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None)  # what a model of transformers has no use for
        problems = files.check(
            {name: (tensor, id(tensor) in stored) for name, tensor in targets.items()},
            ignored=re.compile("|".join(patterns)) if patterns else None,
        )
    except CheckpointError as error:
        problems = [str(error)]
    except Exception as error:  # whatever it was, the other ranks must not wait
        problems = [f"{path} cannot be read: {error!r}"]
    listed = context.ranks.problem_of_any("; ".join(problems), what="opening a checkpoint")
    if files is None or listed:  # then there is something
        if files is not None:
            files.close()
        raise CheckpointError(f"checkpoint {path} doesn't fit the model, which is on meta as before: {listed}")
    return Checkpoint(files, stored)


def load_values(
    model: nn.Module,
    checkpoint: Checkpoint,
    parameters: Sequence[MaterializingParameter],
    units: Sequence[Unit],
    materializer: Materializer,
) -> None:
    """Bring parameters and buffers from the files to where they are kept, one after the other. What fails, fails on all ranks."""

    def elsewhere(told: str) -> CheckpointError:
        return CheckpointError(f"loading {checkpoint.files.path} failed, {told}")

    with units[0].context.ranks.fail_together("loading a checkpoint", elsewhere=elsewhere):
        _load_values(model, checkpoint, parameters, units, materializer)


def _load_values(
    model: nn.Module,
    checkpoint: Checkpoint,
    parameters: Sequence[MaterializingParameter],
    units: Sequence[Unit],
    materializer: Materializer,
) -> None:
    files, names = checkpoint.files, [checkpoint.names[id(parameter)] for parameter in parameters]
    streamed = [(name, u) for name, u, n in zip(names, units, parameters, strict=True) if _streams(n, u)]
    on_drives = _DriveLoader(files, streamed, units[0].context)
    with contextlib.closing(on_drives):
        for parameter, unit, name in zip(parameters, units, names, strict=True):
            if not parameter.is_contiguous():
                whole = materializer.whole(parameter, fills=True)
                whole.copy_(_read(files, name, whole.shape, whole.dtype))
            elif _streams(parameter, unit):
                materializer.forget(parameter)
                on_drives.load_next()
            else:
                materializer.forget(parameter)
                _load_range(files, name, unit)
            parameter._zinf_materialization.filled = parameter._zinf_materialization.kept = True
    for prefix, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            if buffer is not None and attribute not in module._non_persistent_buffers_set and name in files.tensors:
                buffer.copy_(_read(files, name, buffer.shape, buffer.dtype))


def _streams(parameter: MaterializingParameter, unit: Unit) -> bool:
    """Return whether a parameter's values go to a drive in the order in which they are stored."""
    return parameter.is_contiguous() and isinstance(unit.backing, NvmeBacking)


def _load_range(files: ModelFiles, name: str, unit: Unit) -> None:
    """Read this rank's elements into memory."""
    host = torch.zeros(unit.shard_numel, dtype=unit.dtype)
    for span, (start, end) in zip(unit.spans, unit.held, strict=True):
        files.read(name, host[span.place : span.place + end - start], start=start)
    unit.start_saving(host, from_host=True).wait()


class _DriveLoader:
    """Reads this rank's elements of parameters piece by piece, of later parameters too, while those before them are written."""

    def __init__(self, files: ModelFiles, units: Sequence[tuple[str, Unit]], context: Context) -> None:
        self._files = files
        self._context = context
        self._rooms = BufferPool(sys.maxsize, account=lambda change: context.memory.host_ledger.add("staging", change))
        self._writer = PieceWriter(context.memory.host_ledger, threads=torch.get_num_threads())
        planned = [(name, unit, pieces_of(unit)) for name, unit in units]
        self._coming = ((name, unit, piece) for name, unit, pieces in planned for piece in pieces)
        self._counts = collections.deque(len(pieces) for _, _, pieces in planned)
        self._reading: collections.deque[tuple[Unit, Piece, Reading]] = collections.deque()
        self._ahead = 0
        """Bytes of these."""
        self._loaded: list[Unit] = []

    def load_next(self) -> None:
        """Load the next of the parameters; the last pieces may still be written when this returns."""
        last: Unit | None = None
        for number in range(self._counts.popleft()):
            self._read_ahead()
            unit, piece, reading = self._reading.popleft()
            last = unit
            if number == 0:
                unit.spoil(f"loading {unit.name} ended in its middle: the values are incomplete. Load the checkpoint again")
            self._ahead -= unit.format.bytes(piece.valid)
            self._writer.write(unit, piece, reading.finish)
        if last is not None:
            self._loaded.append(last)

    def close(self) -> None:
        """Return when all is written."""
        try:
            self._writer.close()
            for unit in self._loaded:
                unit.restored()
        finally:
            self._rooms.close()

    def _read_ahead(self) -> None:
        while (not self._reading or self._ahead < _BYTES_AHEAD) and (coming := next(self._coming, None)) is not None:
            name, unit, piece = coming
            if self._rooms.bytes > _MOST_ROOM_BYTES:
                self._rooms.clear()  # of idle ones, which may be of other sizes than are needed now
            reading = self._files.begin(name, piece.valid, start=piece.start, engine=self._context.engine, pool=self._rooms)
            self._reading.append((unit, piece, reading))
            self._ahead += unit.format.bytes(piece.valid)


def _read(files: ModelFiles, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
    files.read(name, flat)
    return flat.view(shape)
