"""Loads a saved checkpoint onto any number of ranks, tiers and tiles: each rank reads the elements that it has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError
from zinf_compile.ir.formats import format_of
from zinf_compile.optim.load_pieces import WantedState, load_states, prepare_states
from zinf_compile.optim.record import record_of
from zinf_compile.optim.state_accounts import forget_states
from zinf_compile.optim.step_hooks import install
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.units.shard_values import ParameterShard
from zinf_compile.runtime.units.steps_taken import forget_steps
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.arguments import path_of, plain
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.tensor import ShardedTensor

from .accumulated_gradients import check_gradients, load_gradients, whole_gradients
from .background import wait_for_save
from .checkpoint_files import CheckpointFiles
from .companions import companion_filled, companion_to_fill
from .fill_shards import ShardToFill, fill_shards, read_ahead
from .fit import Fitting, SavedOptimizer, fit, named_optimizers
from .gathered import agree_on_units, partitioned_parameters, state_names
from .intake import DType, Rename
from .local_buffers import load_local_buffers, local_buffers_of
from .open_files import find_checkpoint, open_files
from .random_states import check_random_states, load_random_states
from .saved_tiles import cut_as_saved
from .shard_reader import ShardReader, ShardReading, whole_reading


class MetaModel(Protocol):
    """A model on meta that can be partitioned."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that it is going to be partitioned over."""

    def partitioned(self) -> contextlib.AbstractContextManager[None]:
        """Partition it for values that are loaded inside; after an error there it is on meta as before."""


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    dtype: DType | None = None,
    rename: Rename | None = None,
    meta: MetaModel | None = None,
) -> dict[str, Any]:
    """Load a checkpoint, see `zinf_compile.load`; `meta`: the model, where it is on meta."""
    wait_for_save()
    model = plain(model)
    unit = agree_on_units(partitioned_parameters(model), "loading a checkpoint", "", compare_steps=False)
    ranks = meta.ranks if meta is not None else None if unit is None else unit.ranks
    loading = _Loading(model, ranks, empty=meta is not None)
    path = loading.find(folder, optimizer)
    opening = partial(open_files, path, optimizers=loading.optimizers, dtype=dtype, rename=rename)
    if meta is None:
        return loading.load(opening)
    loading.check(opening)
    try:
        with meta.partitioned():
            return loading.load(opening)
    except BaseException:
        for _, each in loading.optimizers:
            forget_states(each)  # of parameters that are on meta again
        raise


Opening = Callable[..., CheckpointFiles]
"""Opens the checkpoint for a model's `targets`."""


class _Loading:
    """One load of a model and its optimizers, by `ranks` together. `empty`: the model has no values before."""

    def __init__(self, model: nn.Module, ranks: Ranks | None, *, empty: bool) -> None:
        self._model, self._ranks, self._empty = model, ranks, empty
        self._folder: str | os.PathLike[str] = ""
        self.optimizers: list[tuple[str, Optimizer]] = []
        """Those that were given, with their names in the checkpoint."""

    def find(self, folder: str | os.PathLike[str], optimizer: Optimizer | Sequence[Optimizer]) -> Path:
        """Take what is loaded from, and into; return the path of the newest checkpoint, which rank 0 chooses.

        Raises `TypeError` for what is no path or no optimizer, `CheckpointError` where there is none.
        """
        self._folder = folder
        with self._together("opening a checkpoint"):
            path = path_of(folder)
            self.optimizers = named_optimizers(optimizer)
            name = find_checkpoint(path) if self._ranks is None or self._ranks.rank == 0 else ""
        return path / (name if self._ranks is None else str(self._ranks.share(name, what="choosing a checkpoint")))

    def check(self, opening: Opening) -> None:
        """Raise `CheckpointError` unless the checkpoint fits the model, which is on meta, and its optimizers."""
        with self._together("opening a checkpoint"):
            targets = state_names(self._model)
            with contextlib.closing(opening(targets=targets)) as files:
                fit(files, targets, self.optimizers, on_meta=True)
                check_gradients(files, targets)

    def load(self, opening: Opening) -> dict[str, Any]:
        """Check everything, then load everything; return `extra`."""
        ranks, optimizers = self._ranks, self.optimizers
        found = partitioned_parameters(self._model)
        with contextlib.ExitStack() as closing:
            with self._together("opening a checkpoint"):
                targets = state_names(self._model)
                files = opening(targets=targets)
                closing.callback(files.close)
                fitting = fit(files, targets, optimizers)
                check_gradients(files, targets)
                buffers = local_buffers_of(files, targets, ranks)
                check_random_states(files, ranks)
                if fitting.optimizers:  # else a graph may still cut the parameters as it needs
                    cut_as_saved(files.settings.get("tiles", []), targets, empty=self._empty)
                for saved in fitting.optimizers:
                    prepare_states(saved.optimizer, {place: files.tensors[key].dtype for place, key in saved.large.items()})
                for key in [*fitting.whole_keys(), *whole_gradients(files, targets), *buffers]:
                    files.check(key)
            if ranks is not None:
                ranks.agree(
                    [f"{files.folder.name}, checksum {files.checksum}"], what="opening a checkpoint", mismatch=CheckpointError
                )
            with (
                _refused_after_an_error(files, found.values(), [each for _, each in optimizers]),
                self._together("loading a checkpoint"),
                torch.no_grad(),
            ):
                _load_model(files, fitting)
                for saved in fitting.optimizers:
                    _load_optimizer(files, saved)
                load_gradients(files, targets)
                load_local_buffers(files, buffers, targets)
                load_random_states(files, ranks)
        units = [parameter._zinf_unit for parameter in found.values()]
        forget_steps(units)
        for unit in units:
            unit.context.eager_changes = 0
        for _, each in optimizers:
            record_of(each).checkpoint = str(files.folder)
        return fitting.extra

    def _together(self, what: str) -> contextlib.AbstractContextManager[None]:
        def elsewhere(told: str) -> CheckpointError:
            return CheckpointError(f"loading {os.fspath(self._folder)} failed, {told}")

        return contextlib.nullcontext() if self._ranks is None else self._ranks.fail_together(what, elsewhere=elsewhere)


@contextlib.contextmanager
def _refused_after_an_error(
    files: CheckpointFiles, parameters: Collection[ShardedParameter], optimizers: Sequence[Optimizer]
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


def _load_model(files: CheckpointFiles, fitting: Fitting) -> None:
    sharded = {key: tensor for key, tensor in fitting.model.items() if isinstance(tensor, ShardedParameter)}
    for tensor in sharded.values():
        tensor._zinf_unit.begin_replacing()
    companions = {key: tensor for key, tensor in fitting.model.items() if isinstance(tensor, ShardedTensor)}
    fill_shards(
        [_parameter_to_fill(files, key, tensor._zinf_unit) for key, tensor in sharded.items()]
        + [companion_to_fill(files, key, tensor) for key, tensor in companions.items()]
    )
    for tensor in sharded.values():
        tensor._zinf_unit.restored()
        torch.autograd.graph.increment_version(tensor)
    for companion in companions.values():
        companion_filled(companion)
    for key, whole in fitting.model.items():
        if not isinstance(whole, ShardedParameter | ShardedTensor):
            whole.copy_(files.whole(key))


def _parameter_to_fill(files: CheckpointFiles, key: str, unit: Unit) -> ShardToFill:
    resident = unit.shard if unit.backing is None else unit.resident
    in_place = resident is not None and resident.device.type == "cpu"
    return ShardToFill(
        ShardReader(files, key, unit), unit, unit.dtype, ParameterShard(unit).write, resident if in_place else None
    )


def _load_optimizer(files: CheckpointFiles, saved: SavedOptimizer) -> None:
    for group, settings in zip(saved.optimizer.param_groups, saved.groups, strict=True):
        for name, value in settings.items():
            present = group.get(name)
            both = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
            group[name] = value.to(present.device) if both else value  # type: ignore[union-attr]
    readers: dict[str, ShardReader] = {}

    def begin(wanted: WantedState) -> ShardReading:
        key = saved.large[wanted.parameter, wanted.name]
        if wanted.unit is None:
            return whole_reading(files, key, wanted.start, wanted.end)
        if key not in readers:
            readers[key] = ShardReader(files, key, wanted.unit)
        return readers[key].begin(wanted.start, wanted.end)

    def size(wanted: WantedState) -> int:
        key = saved.large[wanted.parameter, wanted.name]
        return format_of(files.tensors[key].dtype).bytes(wanted.end - wanted.start)

    types = {place: files.tensors[key].dtype for place, key in saved.large.items()}
    load_states(saved.optimizer, saved.small, types, lambda wanted: read_ahead(wanted, begin, size))
