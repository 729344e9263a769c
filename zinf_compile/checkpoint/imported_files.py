"""A checkpoint of another program in the form in which `load` reads one, made to fit the model and optimizers that it is for.

Called by `open_files`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from zinf_compile.optim.chunks import MASTER
from zinf_compile.optim.elementwise_probe import states_kept
from zinf_compile.runtime.storage.engine import crc32c
from zinf_compile.sharded.parameter import ShardedParameter

from .checkpoint_files import CheckpointFiles, LaterReading, Reading
from .foreign import ForeignCheckpoint, ForeignOptimizer, ForeignTensor
from .gathered import first_names, tied_names
from .intake import DType, Rename, plan_intake
from .plain_values import encode
from .rectangles import Rectangle
from .saved_tensors import Saved

_OF_THE_MACHINE = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings that say how an optimizer computes, not what: those of the one that is given stay."""


class ImportedFiles(CheckpointFiles):
    """The tensors and settings of a `ForeignCheckpoint`, under the names and in the types that the model asks for.

    Of what was trained in mixed precision, the copies in higher precision become the parameters of a model of any floating-point
    type, and its master copies where it keeps some. States have the types in which the given optimizer keeps them.
    """

    def __init__(
        self,
        found: ForeignCheckpoint,
        targets: Mapping[str, torch.Tensor],
        optimizers: Sequence[tuple[str, Optimizer]],
        *,
        dtype: DType | None,
        rename: Rename | None,
    ) -> None:
        self._found = found
        self._sources: dict[str, ForeignTensor] = {}
        self._plain: dict[str, torch.Tensor] = {}
        self.folder, self.ranks = found.path, 1
        self.tensors, self.settings = {}, {}
        paths = [(archive.path.name, archive.path.stat().st_size) for archive in found.archives]
        self.checksum = crc32c(str(paths).encode())
        stored = {**found.tensors, **found.masters}
        intake = plan_intake({n: t.dtype for n, t in stored.items()}, rename, dtype, found.path, others=found.aliases)
        self._names = intake.names
        for name, tensor in stored.items():
            wanted = intake.dtypes[intake.names[name]]
            target = targets.get(intake.names[name])
            if dtype is None and found.masters and target is not None and target.is_floating_point() and _floats(wanted):
                wanted = target.dtype
            self._add(f"model.{intake.names[name]}", tensor, wanted)
        aliases = {intake.names[alias]: intake.names[name] for alias, name in found.aliases.items()}
        given = {*aliases, *(intake.names[name] for name in stored)}
        tied = {name: aliases.get(other, other) for name, other in tied_names(targets, given).items()}
        self.settings["aliases"] = aliases | tied
        self.settings["extra"] = self._encoded(found.extra, "extra")
        of = [prefix for prefix, _ in optimizers] if len(optimizers) == len(found.optimizers) else []
        prefixes = of or [f"optimizer.{number}" for number in range(len(found.optimizers))]
        self.settings["optimizers"] = {prefix: {"class": "", "groups": [], "states": {}} for prefix in prefixes}
        if of:
            for (prefix, optimizer), each in zip(optimizers, found.optimizers, strict=True):
                self.settings["optimizers"][prefix] = self._optimizer(prefix, optimizer, each, targets)

    def begin(self, key: str, start: int, numel: int) -> Reading:
        """See `CheckpointFiles.begin`; everything is read when it is asked for."""
        return LaterReading(partial(self._fill, key, start))

    def _fill(self, key: str, start: int, into: torch.Tensor) -> None:
        if key in self._plain:
            into.copy_(self._plain[key].reshape(-1)[start : start + into.numel()])
        elif into.numel():
            self._sources[key].read(start, into)

    def read_rectangle(self, key: str, wanted: Rectangle) -> torch.Tensor:
        """See `CheckpointFiles.read_rectangle`."""
        shape = self.tensors[key].shape
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        if not wanted.numel:
            return torch.empty(wanted.sizes, dtype=self.tensors[key].dtype)
        first = sum(offset * stride for offset, stride in zip(wanted.offsets, strides, strict=True))
        extent = 1 + sum((size - 1) * stride for size, stride in zip(wanted.sizes, strides, strict=True))
        values = torch.empty(extent, dtype=self.tensors[key].dtype)
        self.read(key, first, values)
        return values.as_strided(wanted.sizes, strides)

    def check(self, key: str) -> None:
        """Do nothing: files of `torch.save` have no checksums that are read by ranges."""

    def close(self) -> None:
        """See `CheckpointFiles.close`."""
        self._found.close()

    def _add(self, key: str, tensor: ForeignTensor, dtype: torch.dtype | str) -> None:
        assert isinstance(dtype, torch.dtype), "as PyTorch has saved it"
        self._sources[key] = tensor
        self.tensors[key] = Saved(tensor.shape, dtype)

    def _encoded(self, value: Any, where: str) -> Any:
        tensors: dict[str, torch.Tensor] = {}
        encoded = encode(value, where, tensors)
        self._plain |= tensors
        self.tensors |= {key: Saved(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        return encoded

    def _optimizer(
        self, prefix: str, optimizer: Optimizer, found: ForeignOptimizer, targets: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        first = first_names(targets)
        mine = [[first.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        flat = [name for group in mine for name in group]
        names = dict(self._names)
        if found.numbered:
            numbers = [number for group in found.groups or [] for number in group]
            names |= {number: flat[at] if at < len(flat) else f"parameter {number}" for at, number in enumerate(numbers)}
        groups = _groups(found, names, mine)
        settings = found.settings if len(found.settings) == len(groups) else [{}] * len(groups)
        given = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        kept: set[str] = set()
        states = {}
        for name, large in found.states.items():
            new = names.get(name, name)
            parameter = targets.get(new)
            if parameter is None or id(parameter) not in given:
                continue  # then the groups differ, too
            unit = parameter._zinf_unit if isinstance(parameter, ShardedParameter) else None
            master = None if unit is None else unit.placement.master_of(unit.dtype)
            types = states_kept(optimizer, given[id(parameter)], master or parameter.dtype)
            kept |= types.keys()
            if unit is None and MASTER in large:  # partitioned later, perhaps with master copies; else a step rounds its states
                types = {}
            where = f"{prefix}.state.{new}"
            for state, tensor in large.items():
                self._add(f"{where}.{state}", tensor, types.get(state, tensor.dtype))
            if master is not None and name in self._found.masters:
                self._add(f"{where}.{MASTER}", self._found.masters[name], master)
            states[new] = self._encoded(_as_kept(found.small.get(name, {}), optimizer), where)
        made = {state for large in found.states.values() for state in large}
        lacking = sorted(made - kept - {MASTER})
        return {
            "class": f"one with {', '.join(lacking)}" if lacking else type(optimizer).__name__,
            "groups": [
                {
                    "params": inside,
                    "settings": self._encoded(_settings(mine_, theirs), f"{prefix}.group.{number}"),
                }
                for number, (inside, mine_, theirs) in enumerate(
                    zip(groups, [*optimizer.param_groups, *[{}] * len(groups)], settings, strict=False)
                )
            ],
            "states": states,
        }


def _groups(found: ForeignOptimizer, names: Mapping[str, str], mine: list[list[str]]) -> list[list[str]]:
    """Return the names by group: those given where they are the same ones, frozen ones and order aside."""
    if found.groups is None:
        return mine
    theirs = [[names.get(name, name) for name in group] for group in found.groups]
    all_of_theirs = {name for group in theirs for name in group}
    alike = len(theirs) == len(mine) and all(
        set(a) == {name for name in b if name in all_of_theirs} for a, b in zip(theirs, mine, strict=True)
    )
    return mine if alike else theirs


def _settings(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in theirs.items() if name in mine and name not in _OF_THE_MACHINE}


def _as_kept(small: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return step counts as PyTorch's optimizers keep them: DeepSpeed's own have numbers."""
    of_torch = type(optimizer).__module__.startswith("torch.")
    return {
        name: torch.tensor(float(value), dtype=torch.float32) if of_torch and isinstance(value, int | float) else value
        for name, value in small.items()
    }


def _floats(dtype: torch.dtype | str) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
