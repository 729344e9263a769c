"""Loads a saved checkpoint onto any number of ranks, tiers and tiles: each rank reads the elements that it has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError
from zinf_compile.optim.state_pieces import OwnStates, load_states
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.runtime.units.shard_values import ParameterShard, pieces_of
from zinf_compile.runtime.units.steps_taken import forget_steps
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.parameter import ShardedParameter

from .accumulated_gradients import load_gradients
from .background import wait_for_save
from .gathered import agree_on_units, partitioned_parameters, plain, state_names
from .local_buffers import load_local_buffers
from .plain_values import decode
from .random_states import load_random_states
from .saved_files import SavedFiles
from .shard_parts import Stretch, memory_order, stretches_of


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] = ()) -> dict[str, Any]:
    """Load the newest checkpoint of a folder, or the one that it is, which `save` has made; return its `extra`.

    A collective operation, for a model that is partitioned or whole, on any number of ranks, tiers and tiles. Everything is
    checked before anything changes: `CheckpointError` names all mismatches, on all ranks.
    """
    wait_for_save()
    model = plain(model)
    found = partitioned_parameters(model)
    unit = agree_on_units(found, "loading a checkpoint", "", compare_steps=False)
    ranks = None if unit is None else unit.ranks
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    prefixes = [("optimizer" if len(optimizers) == 1 else f"optimizer.{number}", each) for number, each in enumerate(optimizers)]
    with contextlib.ExitStack() as closing:
        with _together(ranks, "opening a checkpoint"):
            files = SavedFiles(folder)
            closing.callback(files.close)
            targets = state_names(model)
            names = {id(tensor): name for name, tensor in reversed(targets.items())}
            problems = [*_model_problems(files, targets), *_optimizer_problems(files, prefixes, names)]
            if problems:
                raise CheckpointError(f"{files.folder} doesn't fit; nothing was changed. {'; '.join(problems)}")
        with _together(ranks, "loading a checkpoint"), torch.no_grad():
            _load_model(files, targets)
            for prefix, each in prefixes:
                _load_optimizer(files, prefix, each, names)
            load_gradients(files, targets, lambda key, unit: _ShardReader(files, key, unit).read)
            extra = decode(files.settings["extra"], "extra", _Tensors(files))
            load_local_buffers(files, targets, ranks)
            load_random_states(files, ranks)
    forget_steps(parameter._zinf_unit for parameter in found.values())
    if unit is not None:
        unit.context.eager_changes = 0
    assert isinstance(extra, dict), "as it was saved"
    return extra


class _Tensors(dict[str, torch.Tensor]):
    """The tensors among plain values, read when they are asked for."""

    def __init__(self, files: SavedFiles) -> None:
        super().__init__()
        self._files = files

    def __contains__(self, key: object) -> bool:
        return key in self._files.tensors

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._files.whole(key)


def _model_problems(files: SavedFiles, targets: dict[str, torch.Tensor]) -> list[str]:
    aliases = files.settings["aliases"]
    saved = {key.removeprefix("model."): t for key, t in files.tensors.items() if key.startswith("model.")}
    saved |= {alias: saved[name] for alias, name in aliases.items()}
    problems = [f"missing: {name}" for name in targets if name not in saved]
    problems += [f"unexpected: {name}" for name in saved if name not in targets]
    for name in targets.keys() & saved.keys():
        here, there = targets[name], saved[name]
        if tuple(here.shape) != there.shape:
            problems.append(f"shape of {name}: {list(there.shape)} in the checkpoint, {list(here.shape)} in the model")
        if here.dtype != there.dtype:
            problems.append(f"type of {name}: {there.dtype} in the checkpoint, {here.dtype} in the model")
    return sorted(problems)


def _optimizer_problems(files: SavedFiles, optimizers: Sequence[tuple[str, Optimizer]], names: dict[int, str]) -> list[str]:
    saved, problems = files.settings.get("optimizers", {}), []
    if optimizers and len(saved) != len(optimizers):
        return [f"{len(saved)} optimizers in the checkpoint, {len(optimizers)} given"]
    for prefix, optimizer in optimizers:
        there = saved[prefix]
        if there["class"] != type(optimizer).__name__:
            problems.append(f"{prefix} is a {there['class']} in the checkpoint, {type(optimizer).__name__} is given")
        groups = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
        if groups != [group["params"] for group in there["groups"]]:
            problems.append(f"{prefix} has other parameters, or other groups of them")
    return problems


def _load_model(files: SavedFiles, targets: dict[str, torch.Tensor]) -> None:
    aliases, done = files.settings["aliases"], set()
    for name, tensor in targets.items():
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        key = f"model.{aliases.get(name, name)}"
        if isinstance(tensor, ShardedParameter):
            unit, shard = tensor._zinf_unit, ParameterShard(tensor._zinf_unit)
            unit.wait_updated()
            _fill(files, key, unit, shard.write)
            unit.restored()
            torch.autograd.graph.increment_version(tensor)
        else:
            tensor.copy_(files.whole(key))


def _fill(files: SavedFiles, key: str, unit: Unit, write: Callable[[int, torch.Tensor], Pending]) -> None:
    """Read this rank's elements of a tensor and give them to `write` piece by piece."""
    reader = _ShardReader(files, key, unit)
    for start, end in pieces_of(unit):
        write(start, reader.read(start, end)).wait()


class _ShardReader:
    """Reads pieces of this rank's shard of a tensor; padding is zeros."""

    def __init__(self, files: SavedFiles, key: str, unit: Unit) -> None:
        self._files, self._key = files, key
        saved = files.tensors[key]
        numel = torch.Size(saved.shape).numel()
        self._stretches: list[Stretch] = stretches_of(unit.spans, unit.shard_group.rank, numel)
        self._whole: torch.Tensor | None = None
        if not saved.in_runs or memory_order(unit.shape, unit.stride) is not None:  # in channels-last, there or here
            self._whole = unit.flat(files.whole(key))

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return the elements [start, end) of the shard, in the type in which they were saved."""
        piece = torch.zeros(end - start, dtype=self._files.tensors[self._key].dtype)
        for first, last, place in self._stretches:
            low, high = max(place, start), min(place + last - first, end)
            if low < high:
                source, into = first + low - place, piece[low - start : high - start]
                if self._whole is not None:
                    into.copy_(self._whole[source : source + into.numel()])
                else:
                    self._files.read(self._key, source, into)
        return piece


def _load_optimizer(files: SavedFiles, prefix: str, optimizer: Optimizer, names: dict[int, str]) -> None:
    there, tensors = files.settings["optimizers"][prefix], _Tensors(files)
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, there["groups"], strict=True)):
        for name, value in decode(saved["settings"], f"{prefix}.group.{number}", tensors).items():
            present = group.get(name)
            both = isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor)
            group[name] = value.to(present.device) if both else value  # type: ignore[union-attr]
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    wanted: dict[torch.Tensor, dict[str, Any]] = {}
    for name, small in there["states"].items():
        wanted[parameters[name]] = decode(small, f"{prefix}.state.{name}", tensors)
    keys = {
        (p, key.removeprefix(f"{prefix}.state.{name}.")): key
        for name, p in parameters.items()
        for key in files.tensors
        if key.startswith(f"{prefix}.state.{name}.") and key.removeprefix(f"{prefix}.state.{name}.") not in wanted.get(p, {})
    }
    readers: dict[str, _ShardReader] = {}

    def read(parameter: torch.Tensor, state: str, own: OwnStates, start: int, end: int) -> torch.Tensor:
        key = keys[parameter, state]
        if own.unit is None:
            return files.whole(key).reshape(-1)[start:end]
        if key not in readers:
            readers.clear()
            readers[key] = _ShardReader(files, key, own.unit)
        return readers[key].read(start, end)

    load_states(optimizer, wanted, {place: files.tensors[key].dtype for place, key in keys.items()}, read)


def _together(ranks: Ranks | None, what: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if ranks is None else ranks.fail_together(what)
