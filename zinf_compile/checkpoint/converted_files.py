"""A saved checkpoint under other names and in other types: what `rename=` and `dtype=` make of it.

Called by `open_files`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from zinf_compile.optim.precision import SHORT
from zinf_compile.sharded.parameter import ShardedParameter

from .checkpoint_files import CheckpointFiles, LaterReading, Reading
from .intake import DType, Rename, plan_intake
from .rectangles import Rectangle

_MODEL = "model."
_NAMED = re.compile(r"(model\.|gradient\.|buffer\.\d+\.)(.+)", re.DOTALL)
"""Keys of parameters and buffers, of their gradients and of each rank's own buffers."""
_COUNT = "step"
"""The state that PyTorch's optimizers keep in fp32 whatever their parameter's type is; it has the shape of one of one number."""


class ConvertedFiles(CheckpointFiles):
    """The tensors and settings of a checkpoint by their new names; parameters and buffers in their new types.

    Raises `CheckpointError` naming all that can't be renamed or converted. States of optimizers that have their parameter's type
    get its new one, see `_type_updated_in`; others keep theirs. `targets`: the model's tensors by name.
    """

    def __init__(
        self, files: CheckpointFiles, targets: Mapping[str, torch.Tensor], *, dtype: DType | None, rename: Rename | None
    ) -> None:
        self._files = files
        self.folder, self.checksum, self.ranks = files.folder, files.checksum, files.ranks
        stored = {key.removeprefix(_MODEL): t.dtype for key, t in files.tensors.items() if key.startswith(_MODEL)}
        aliases = files.settings.get("aliases", {})
        intake = plan_intake(stored, rename, dtype, files.folder, others=aliases)
        optimizers = files.settings.get("optimizers", {})
        self._old = {new_key(key, intake.names, optimizers): key for key in files.tensors}
        new = {old: key for key, old in self._old.items()}
        self.tensors = {}
        for old, tensor in files.tensors.items():
            dtype_now = intake.dtypes[new[old].removeprefix(_MODEL)] if old.startswith(_MODEL) else tensor.dtype
            owner = _owner(old, intake.names, optimizers)
            parameter = files.tensors.get(f"{_MODEL}{owner}")
            alike = parameter is not None and (tensor.dtype, tensor.shape) == (parameter.dtype, parameter.shape)
            if alike and old.rpartition(".")[2] != _COUNT:
                dtype_now = _type_updated_in(targets.get(intake.names[owner]), tensor.dtype, intake.dtypes[intake.names[owner]])
            assert isinstance(dtype_now, torch.dtype), "as it was saved"
            self.tensors[new[old]] = dataclasses.replace(tensor, dtype=dtype_now)
        self.settings = {
            **files.settings,
            "aliases": {intake.names[alias]: intake.names[name] for alias, name in aliases.items()},
            "tiles": [
                {**group, "parameters": [intake.names.get(name, name) for name in group["parameters"]]}
                for group in files.settings.get("tiles", [])
            ],
            "optimizers": {prefix: _optimizer(saved, intake.names, new) for prefix, saved in optimizers.items()},
        }

    def begin(self, key: str, start: int, numel: int) -> Reading:
        """See `CheckpointFiles.begin`."""
        found = self._files.tensors[self._old[key]].dtype
        reading = self._files.begin(self._old[key], start, numel)
        if found == self.tensors[key].dtype:
            return reading

        def convert(into: torch.Tensor) -> None:
            values = torch.empty(numel, dtype=found)
            reading.finish(values)
            into.copy_(values)

        return LaterReading(convert)

    def read_rectangle(self, key: str, wanted: Rectangle) -> torch.Tensor:
        """See `CheckpointFiles.read_rectangle`."""
        return self._files.read_rectangle(self._old[key], wanted).to(self.tensors[key].dtype)

    def check(self, key: str) -> None:
        """See `CheckpointFiles.check`."""
        self._files.check(self._old[key])

    def close(self) -> None:
        """See `CheckpointFiles.close`."""
        self._files.close()


def new_key(key: str, names: Mapping[str, str], optimizers: Mapping[str, Any]) -> str:
    """Return the key of a tensor whose parameter has a new name."""
    if of_parameter := _NAMED.fullmatch(key):
        return of_parameter[1] + names.get(of_parameter[2], of_parameter[2])
    if name := _owner(key, names, optimizers):
        prefix, _, rest = key.partition(f".state.{name}")
        return f"{prefix}.state.{names.get(name, name)}{rest}"
    return key


def _owner(key: str, names: Mapping[str, str], optimizers: Mapping[str, Any]) -> str:
    """Return the name of the parameter of which a tensor is a state; empty for what is none."""
    for prefix in optimizers:
        if key.startswith(f"{prefix}.state."):
            name = key.removeprefix(f"{prefix}.state.")
            while name not in names and "." in name:
                name = name.rpartition(".")[0]
            return name
    return ""


def _type_updated_in(target: torch.Tensor | None, found: torch.dtype, wanted: torch.dtype | str) -> torch.dtype | str:
    """Return the type of states that have their parameter's type: its new one, or that of its master copy.

    Of a 16-bit parameter that is still whole nobody knows whether it is going to have one: they keep their type.
    """
    if isinstance(target, ShardedParameter):
        return target._zinf_unit.placement.master_of(target.dtype) or wanted
    return found if wanted in SHORT else wanted


def _optimizer(saved: Mapping[str, Any], names: Mapping[str, str], keys: Mapping[str, str]) -> dict[str, Any]:
    return {
        **saved,
        "groups": [{**group, "params": [names.get(name, name) for name in group["params"]]} for group in saved["groups"]],
        "states": {names.get(name, name): _referring(states, keys) for name, states in saved["states"].items()},
    }


def _referring(value: Any, keys: Mapping[str, str]) -> Any:
    """Return an encoded value with the new keys of its tensors."""
    if isinstance(value, list):
        return [_referring(item, keys) for item in value]
    if isinstance(value, dict):
        content = value.get("tensor")
        if len(value) == 1 and isinstance(content, str):
            return {"tensor": keys.get(content, content)}
        return {kind: _referring(item, keys) for kind, item in value.items()}
    return value
