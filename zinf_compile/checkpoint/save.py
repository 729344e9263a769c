"""Saves a model and its optimizers while every rank writes what it has: nothing is gathered, a few pieces are in memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError
from zinf_compile.ir.formats import as_plain, format_of
from zinf_compile.optim.record import State, all_records
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.storage.engine import crc32c
from zinf_compile.sharded.arguments import path_of, plain

from .accumulated_gradients import add_gradients
from .background import BackgroundSave, PartMissingError, one_at_a_time, saving_together, wait_for_save
from .fit import named_optimizers
from .gathered import agree_on_units, partitioned_parameters, reject_hollow, state_names
from .local_buffers import add_local_buffers
from .manifest import MANIFEST, as_json, rank_manifest, with_checksum, write_new
from .random_states import add_random_states, number_of_ranks, uses_numpy
from .rank_contents import RankContents
from .rank_files import RankFiles, check_space
from .reserved_space import ReservedSpace, reserved_in
from .save_folder import SaveFolder
from .saved_files import read_manifest
from .saved_pieces import SavedPieces

_POLL_S = 0.01


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    wait: bool = False,
) -> Path:
    """Save a model, its optimizers and plain values in a new folder inside `folder`, and keep the last `keep` of these.

    `keep` is 1 by default, or what option `checkpoint_keep` says for a folder that was announced by option `checkpoint`.

    A collective operation: all ranks call it after the same step, or between its micro-batches. Saved are parameters, buffers,
    gradients that are there (after a step, `zero_grad()` spares their space), states and settings of optimizers, and the random
    generators of each rank; an averaged model is saved as a part of `model`, as in an `nn.ModuleDict` of both.

    Each rank writes its own shards as safetensors, from where they live, with 64 MiB of them in memory. Without `wait` the
    partitioned parameters and their states are written in the background; whatever is about to change one of them, such as the
    next step, writes it first. Gradients, large whole tensors, and parameters and states in memory that others have references
    to are written before it returns. What a deferred step has still to update is written by that step, from its own buffers, as
    soon as it is updated. `wait_for_save` waits for all of it, and raises its errors.

    A process that is killed at any moment leaves the last save as it was, and the next save removes what it left. One job at a
    time saves to a folder; threads of one process take turns. Returns the new folder. Raises `CheckpointError` naming a value of
    `extra`, or a setting, that is not plain, or a folder that another job saves to; `OSError` with errno and path. Where it
    writes nothing before it returns, space is compared with what is free, and allocated in the background, before any rank writes
    a byte. What is raised on one rank is raised on all, also for an argument that is wrong there alone; `RankMismatchError` where
    ranks give different folders. Nothing of the training is changed.
    """
    with one_at_a_time():
        return _save(folder, model, optimizer, {} if extra is None else extra, keep, wait)


def _save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    extra: Mapping[str, Any],
    keep: int | None,
    wait: bool,
) -> Path:
    wait_for_save()
    model = plain(model)
    unit = agree_on_units(partitioned_parameters(model), "saving a checkpoint", "")
    ranks = None if unit is None else unit.ranks
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    contents = RankContents(rank, size)
    stepping = _optimizers_of(model)
    with saving_together(ranks, folder):
        reject_hollow(state_names(model))
        place = SaveFolder(path_of(folder).absolute(), keep=keep, advice=_advice(ranks))
        contents.take_steps(stepping)
        names = contents.add_model(model)
        optimizers = named_optimizers(optimizer)
        for prefix, each in optimizers:
            contents.add_optimizer(prefix, each, names)
        add_gradients(contents, state_names(model))
    add_local_buffers(contents, state_names(model), ranks)
    devices = {tensor.device.type for tensor in state_names(model).values()}
    add_random_states(contents, size, devices, numpy=uses_numpy(ranks))
    with saving_together(ranks, place.folder):
        if not isinstance(extra, Mapping):
            raise CheckpointError(f"extra is a {type(extra).__name__}; accepted: a mapping of names to plain values")
        contents.add_plain("extra", dict(extra))
        if rank == 0:
            _manifest(place.folder, contents, [0] * size)  # what can't be read again is refused before anything is written
    if ranks is not None:
        ranks.agree([f"folder {place.folder}", *_lines(contents)], what="saving a checkpoint")
    space = reserved_in(place.folder)
    try:
        _begin(place, ranks, contents, space, [each for _, each in optimizers], stepping).start()
    except BaseException:
        if space is not None:
            space.renew()
        raise
    if wait or not contents.can_wait:
        wait_for_save()
    return place.folder / place.name


def _optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Return the optimizers that have stepped any of a model's parameters, saved with it or not."""
    held = {id(parameter) for parameter in state_names(model).values()}
    found = [each for each, record in all_records() if record.state is not State.STAND_IN]
    return [each for each in found if any(id(p) in held for group in each.param_groups for p in group["params"])]


def _begin(
    place: SaveFolder,
    ranks: Ranks | None,
    contents: RankContents,
    space: ReservedSpace | None,
    optimizers: Sequence[Optimizer],
    telling: Sequence[Optimizer],
) -> BackgroundSave:
    """Write what may not be written later; return the rest of the save."""
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    slot = None if space is None else space.take()
    with contextlib.ExitStack() as ending:
        if slot is not None:
            ending.callback(slot.close)
            slot.free_rest()  # for the names of new files
        if rank == 0:
            ending.callback(place.abandon)
        with saving_together(ranks, place.folder):
            contents.copy_small()
            begun = place.begin() if rank == 0 else ("", "")
        partial, place.name = _share(ranks, begun, "naming a save")
        staging = place.folder / partial
        files = ending.enter_context(contextlib.closing(RankFiles(staging, contents, rank)))
        if space is not None:
            space.grow(files.sizes)
        mine = sum(files.sizes)
        size_of_all, lacking, with_values = _sums(
            ranks, mine, mine if slot is None else slot.lacks(files.sizes), contents.has_values
        )
        with saving_together(ranks, place.folder):
            if rank == 0:
                check_space(place.folder, size_of_all, None if slot is None else lacking)
        if with_values:  # nothing is written where there is too little space on any rank's drive
            with saving_together(ranks, place.folder):
                files.allocate(slot)
            with saving_together(ranks, place.folder):
                files.write()
        elif ranks is not None:
            ranks.apart()  # at the first save a process group, whose error ends this one

        def commit(given_up: Callable[[], bool]) -> None:
            checksums = [_checksum(staging / rank_manifest(number), given_up) for number in range(size)]
            write_new(staging / MANIFEST, _manifest(place.folder, contents, checksums))
            place.commit()

        def renew() -> None:
            if space is not None:
                space.keep = place.keep
                space.renew()

        closing = ending.pop_all()
        save = BackgroundSave(
            place.folder,
            ranks,
            optimizers,
            telling=telling,
            pieces=SavedPieces(contents.pieces, files.put, has_room=bool(with_values)),
            watched=contents.watched,
            steps=contents.steps.values(),
            allocate=None if with_values else lambda: files.allocate(slot),
            finish=files.finish,
            commit=commit if rank == 0 else None,
            close=closing.close,
            ended=renew,
            name=place.name,
        )
        contents.release()
        return save


def _advice(ranks: Ranks | None) -> str:
    """Return what to do where each rank of a process group saves a whole model of its own to one folder."""
    size = number_of_ranks(ranks)
    if ranks is not None or size == 1:
        return ""
    return (
        f". Nothing of this model is partitioned, so that each of the {size} ranks saves all of it: where they are the same job, "
        "call save on one of them, by `if torch.distributed.get_rank() == 0`, or after the first compiled call"
    )


def _checksum(manifest: Path, given_up: Callable[[], bool]) -> int:
    """Return the checksum of a rank's manifest, once it is there."""
    while not manifest.exists():
        if given_up():
            raise PartMissingError(f"{manifest} is missing: that rank has not saved its part")
        time.sleep(_POLL_S)
    return crc32c(manifest.read_bytes())


def _manifest(folder: Path, contents: RankContents, checksums: Sequence[int]) -> bytes:
    """Return the manifest of the whole. Raises `CheckpointError` where `load` would refuse it."""
    try:
        text = with_checksum(as_json({**description(contents, len(checksums)), "ranks": checksums}))
        read_manifest(folder / MANIFEST, text)
    except ValueError as error:
        raise CheckpointError(
            f"no checkpoint is saved in {folder}: load would refuse its manifest ({error}). Accepted: names that UTF-8 can hold, "
            "and settings of optimizers that are nested less deeply"
        ) from error
    return text


def description(contents: RankContents, size: int) -> dict[str, Any]:
    """Return the content of the manifest of the whole, without the checksums of those of ranks."""
    return {
        "format": "zinf_compile checkpoint",
        "version": 1,
        "mesh": [{"axis": "shard", "size": size}],
        "tensors": {key: {"shape": t.shape, **as_plain(format_of(t.dtype))} for key, t in contents.tensors.items()},
        "settings": contents.settings,
    }


def _lines(contents: RankContents) -> list[str]:
    """Return what ranks compare: all tensors but those of `extra`, which rank 0 saves its own of."""
    states = f"states that can wait: {contents.can_wait}"
    return [states] + [
        f"{key} {list(tensor.shape)} {tensor.dtype}" for key, tensor in contents.tensors.items() if not key.startswith("extra.")
    ]


def _share(ranks: Ranks | None, value: Any, what: str) -> Any:
    return value if ranks is None else ranks.share(value, what=what)


def _sums(ranks: Ranks | None, *values: int) -> list[int]:
    """Return the sums of each of these over all ranks. A collective operation."""
    if ranks is None:
        return list(values)
    everyone = ranks.exchange(torch.tensor(values, dtype=torch.float64), what="space for a checkpoint")
    return [int(value) for value in everyone.sum(0)]
