"""Loads a saved checkpoint onto any number of ranks, tiers and tiles: each rank reads the elements that it has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError
from zinf_compile.optim.record import record_of
from zinf_compile.optim.state_pieces import OwnStates, load_states, prepare_states
from zinf_compile.optim.step_hooks import install
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.units.shard_values import ParameterShard
from zinf_compile.runtime.units.steps_taken import forget_steps
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.tensor import ShardedTensor

from .accumulated_gradients import check_gradients, load_gradients, whole_gradients
from .background import wait_for_save
from .companions import load_companion
from .fit import Fitting, SavedOptimizer, fit, named_optimizers
from .gathered import agree_on_units, partitioned_parameters, plain, state_names
from .intake import DType, Rename
from .local_buffers import load_local_buffers, local_buffers_of
from .open_files import find_checkpoint, open_files
from .random_states import check_random_states, load_random_states
from .saved_files import SavedFiles
from .shard_reader import ShardReader, fill_shard


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    dtype: DType | None = None,
    rename: Rename | None = None,
) -> dict[str, Any]:
    """Load the newest checkpoint of a folder, or the one that it is, which `save` has made; return its `extra`.

    A collective operation, for a model that is partitioned or whole, on any number of ranks, tiers and tiles. Gradients become
    those that were accumulated at the save: of a parameter that had none then, there is none afterwards. The random generators of
    each rank become the saved ones; a rank of which the checkpoint has none seeds its own from (seed, rank). Everything is
    checked before anything changes: `CheckpointError` names all mismatches, `BudgetError` the smallest cap that works, on all
    ranks. A load that ends in its middle, as on a file that is damaged, leaves the model and its optimizers refused by
    `StepFailedError` until a load succeeds.

    Checkpoints of DeepSpeed (ZeRO-1, 2, 3, universal) and files of `torch.save` are loaded alike; nothing in them is executed.

    `dtype`: the type that floating-point parameters and buffers are converted to, or a mapping of names in the model to types.
    `rename`: a mapping of names in the checkpoint to names in the model, or a function. `CheckpointError` names all collisions,
    all names that match nothing and all conversions that lose more than digits behind the point.
    """
    wait_for_save()
    model = plain(model)
    found = partitioned_parameters(model)
    unit = agree_on_units(found, "loading a checkpoint", "", compare_steps=False)
    ranks = None if unit is None else unit.ranks
    optimizers = named_optimizers(optimizer)
    with contextlib.ExitStack() as closing:
        with _together(ranks, "opening a checkpoint", folder):
            name = find_checkpoint(folder) if ranks is None or ranks.rank == 0 else ""
        with _together(ranks, "opening a checkpoint", folder):
            path = Path(folder) / _share(ranks, name)
            targets = state_names(model)
            files = open_files(path, targets, optimizers, dtype=dtype, rename=rename)
            closing.callback(files.close)
            fitting = fit(files, targets, optimizers)
            check_gradients(files, targets)
            buffers = local_buffers_of(files, targets, ranks)
            check_random_states(files, ranks)
            for saved in fitting.optimizers:
                prepare_states(saved.optimizer, saved.large)
            for key in [*fitting.whole_keys(), *whole_gradients(files, targets), *buffers]:
                files.check(key)
        if ranks is not None:
            ranks.agree(
                [f"{files.folder.name}, checksum {files.checksum}"], what="opening a checkpoint", mismatch=CheckpointError
            )
        with (
            _refused_after_an_error(files, found.values(), [each for _, each in optimizers]),
            _together(ranks, "loading a checkpoint", folder),
            torch.no_grad(),
        ):
            _load_model(files, fitting)
            for saved in fitting.optimizers:
                _load_optimizer(files, saved)
            load_gradients(files, targets)
            load_local_buffers(files, buffers)
            load_random_states(files, ranks)
    forget_steps(parameter._zinf_unit for parameter in found.values())
    if unit is not None:
        unit.context.eager_changes = 0
    for _, each in optimizers:
        record_of(each).checkpoint = str(files.folder)
    return fitting.extra


@contextlib.contextmanager
def _refused_after_an_error(
    files: SavedFiles, parameters: Collection[ShardedParameter], optimizers: Sequence[Optimizer]
) -> Iterator[None]:
    """Let nobody compute with what a load has changed in part, here or on another rank."""
    try:
        yield
    except BaseException:
        why = (
            f"loading {files.folder} ended in its middle: parameters and states are replaced in part. Load a checkpoint of model "
            "and optimizer, by zinf_compile.load, and go on from there"
        )
        for parameter in parameters:
            parameter._zinf_unit.spoil(why)
        for optimizer in optimizers:
            record_of(optimizer).mark_ended(why)
        install()  # the hooks that refuse a step
        raise


def _load_model(files: SavedFiles, fitting: Fitting) -> None:
    for key, tensor in fitting.model.items():
        if isinstance(tensor, ShardedParameter):
            unit = tensor._zinf_unit
            if unit.updates is not None:
                unit.updates.replace(unit)
            fill_shard(ShardReader(files, key, unit), unit, ParameterShard(unit).write)
            unit.restored()
            torch.autograd.graph.increment_version(tensor)
        elif isinstance(tensor, ShardedTensor):
            load_companion(files, key, tensor)
        else:
            tensor.copy_(files.whole(key))


def _load_optimizer(files: SavedFiles, saved: SavedOptimizer) -> None:
    for group, settings in zip(saved.optimizer.param_groups, saved.groups, strict=True):
        for name, value in settings.items():
            present = group.get(name)
            both = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
            group[name] = value.to(present.device) if both else value  # type: ignore[union-attr]
    readers: dict[str, ShardReader] = {}

    def read(parameter: torch.Tensor, state: str, own: OwnStates, start: int, end: int) -> torch.Tensor:
        key = saved.large[parameter, state]
        if own.unit is None:
            return files.whole(key).reshape(-1)[start:end]
        if key not in readers:
            readers.clear()
            readers[key] = ShardReader(files, key, own.unit)
        return readers[key].read(start, end)

    types = {place: files.tensors[key].dtype for place, key in saved.large.items()}
    load_states(saved.optimizer, saved.small, types, read)


def _share(ranks: Ranks | None, name: str) -> str:
    return name if ranks is None else str(ranks.share(name, what="choosing a checkpoint"))


def _together(ranks: Ranks | None, what: str, folder: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    def elsewhere(told: str) -> CheckpointError:
        return CheckpointError(f"loading {os.fspath(folder)} failed, {told}")

    return contextlib.nullcontext() if ranks is None else ranks.fail_together(what, elsewhere=elsewhere)
