"""Finds what of a saved checkpoint goes to which tensor of a model and its optimizers, and all that doesn't fit, before a load.

Called by `load`; changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError
from zinf_compile.optim.split_states import split_units
from zinf_compile.optim.state_pieces import Key
from zinf_compile.sharded.arguments import check_optimizer
from zinf_compile.sharded.parameter import ShardedParameter

from .checkpoint_files import CheckpointFiles
from .gathered import first_names
from .plain_values import decode


class SavedTensors(dict[str, torch.Tensor]):
    """The tensors among plain values, read when they are asked for; `asked` are their names."""

    def __init__(self, files: CheckpointFiles) -> None:
        super().__init__()
        self._files = files
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._files.tensors

    def __getitem__(self, key: str) -> torch.Tensor:
        self.asked.add(key)
        return self._files.whole(key)


@dataclasses.dataclass
class SavedOptimizer:
    """The settings and states of one optimizer."""

    optimizer: Optimizer
    groups: list[dict[str, Any]]
    """Settings, by group."""
    small: dict[torch.Tensor, dict[str, Any]]
    """States that are not of their parameter's size."""
    large: dict[Key, str]
    """Keys of the others."""


@dataclasses.dataclass
class Fitting:
    """What a checkpoint has for a model and its optimizers."""

    model: dict[str, torch.Tensor]
    """By key, tied ones once."""
    optimizers: list[SavedOptimizer]
    extra: dict[str, Any]

    def whole_keys(self) -> list[str]:
        """Return the keys of tensors that are whole on each rank: they can't be refused after a load that failed."""
        found = [key for key, tensor in self.model.items() if not isinstance(tensor, ShardedParameter)]
        for each in self.optimizers:
            split = split_units(each.optimizer)
            found += [key for (p, _), key in each.large.items() if not isinstance(p, ShardedParameter) and p not in split]
        return found


def named_optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[tuple[str, Optimizer]]:
    """Return optimizers with the names under which they are saved. Raises `TypeError` for what is none."""
    given = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    for each in given:
        check_optimizer(each)
    return [("optimizer" if len(given) == 1 else f"optimizer.{number}", each) for number, each in enumerate(given)]


def fit(
    files: CheckpointFiles,
    targets: Mapping[str, torch.Tensor],
    optimizers: Sequence[tuple[str, Optimizer]],
    *,
    on_meta: bool = False,
) -> Fitting:
    """Return what goes where; raise `CheckpointError` naming everything that doesn't fit.

    `targets`: the model's tensors by name; `on_meta`: they may be on meta.
    """
    problems = [*_model_problems(files, targets, on_meta=on_meta), *_optimizer_problems(files, optimizers, targets)]
    if problems:
        raise CheckpointError(f"{files.folder} doesn't fit; nothing was changed. {'; '.join(problems)}")
    aliases = files.settings.get("aliases", {})
    first = {number: f"model.{aliases.get(name, name)}" for number, name in first_names(targets).items()}
    found = [_optimizer(files, prefix, each, targets) for prefix, each in optimizers]
    extra = decode(files.settings.get("extra", {"dict": []}), "extra", SavedTensors(files))
    if not isinstance(extra, dict):
        raise CheckpointError(f"extra in {files.folder} is a {type(extra).__name__}; accepted: a dict")
    return Fitting({first[id(tensor)]: tensor for tensor in targets.values()}, found, extra)


def _model_problems(files: CheckpointFiles, targets: Mapping[str, torch.Tensor], *, on_meta: bool) -> list[str]:
    saved = {key.removeprefix("model."): t for key, t in files.tensors.items() if key.startswith("model.")}
    saved |= {alias: saved[name] for alias, name in files.settings.get("aliases", {}).items()}
    problems = [f"missing: {name}" for name in targets if name not in saved]
    problems += [f"unexpected: {name}" for name in saved if name not in targets]
    for name in targets.keys() & saved.keys():
        here, there = targets[name], saved[name]
        if tuple(here.shape) != there.shape:
            problems.append(f"shape of {name}: {list(there.shape)} in the checkpoint, {list(here.shape)} in the model")
        if here.dtype != there.dtype:
            problems.append(f"type of {name}: {there.dtype} in the checkpoint, {here.dtype} in the model")
        if here.device.type == "meta" and not on_meta:
            problems.append(f"{name} is on meta, other tensors of the model are not: make the model on one of both")
    return sorted(problems)


def _optimizer_problems(
    files: CheckpointFiles, optimizers: Sequence[tuple[str, Optimizer]], targets: Mapping[str, torch.Tensor]
) -> list[str]:
    saved, problems = files.settings.get("optimizers", {}), []
    if optimizers and saved.keys() != dict(optimizers).keys():
        return [f"{len(saved)} optimizers in the checkpoint, {len(optimizers)} given"]
    first = first_names(targets)
    for prefix, optimizer in optimizers:
        there, own = saved[prefix], type(optimizer).__name__
        if there["class"] != own:
            problems.append(f"{prefix} is a {there['class']} in the checkpoint, {own} is given")
        here = [[first.get(id(p), "one that the model has not") for p in group["params"]] for group in optimizer.param_groups]
        groups = [group["params"] for group in there["groups"]]
        if len(here) != len(groups):
            problems.append(f"{prefix} has {len(groups)} groups of parameters in the checkpoint, {len(here)} are given")
        for number, (mine, theirs) in enumerate(zip(here, groups, strict=False)):
            problems += [f"group {number} of {prefix} lacks {name}" for name in theirs if name not in mine]
            problems += [f"group {number} of {prefix} has {name} besides" for name in mine if name not in theirs]
            if mine != theirs and sorted(mine) == sorted(theirs):
                problems.append(f"group {number} of {prefix} has its parameters in another order")
    return problems


def _optimizer(files: CheckpointFiles, prefix: str, optimizer: Optimizer, targets: Mapping[str, torch.Tensor]) -> SavedOptimizer:
    there, tensors = files.settings["optimizers"][prefix], SavedTensors(files)
    groups = [_decoded(saved["settings"], f"{prefix}.group.{n}", tensors, files) for n, saved in enumerate(there["groups"])]
    first = first_names(targets)
    parameters = {first[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    unknown = [name for name in there["states"] if name not in parameters]
    if unknown:
        raise CheckpointError(f"{files.folder} has states of {', '.join(unknown)}, which {prefix} has not; nothing was changed")
    small = {
        parameters[name]: _decoded(states, f"{prefix}.state.{name}", tensors, files) for name, states in there["states"].items()
    }
    large: dict[Key, str] = {}
    for key, saved in files.tensors.items():
        if not key.startswith(f"{prefix}.state.") or key in tensors.asked:
            continue
        name, state = _split(key.removeprefix(f"{prefix}.state."), parameters)
        parameter = parameters.get(name)
        if parameter is None or parameter not in small or saved.shape != tuple(parameter.shape):
            raise CheckpointError(
                f"{files.folder} has {key}, shape {list(saved.shape)}, of which {prefix} has no parameter; nothing was changed"
            )
        large[parameter, state] = key
    return SavedOptimizer(optimizer, groups, small, large)


def _decoded(value: Any, where: str, tensors: SavedTensors, files: CheckpointFiles) -> dict[str, Any]:
    found = decode(value, where, tensors)
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} in {files.folder} is a {type(found).__name__}; accepted: a dict")
    return found


def _split(name: str, parameters: Mapping[str, torch.Tensor]) -> tuple[str, str]:
    """Cut the name of a state into that of its parameter and its own."""
    end = name.find(".")
    while end >= 0 and name[:end] not in parameters:
        end = name.find(".", end + 1)
    return (name[:end], name[end + 1 :]) if end >= 0 else (name, "")
