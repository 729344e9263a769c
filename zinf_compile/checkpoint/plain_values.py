"""Plain Python values as JSON and tensors, and back: the settings of optimizers and what users save beside a model.

Everything that is not a tensor is JSON; no value is executed when it is read. Called by `save` and `load`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.sharded.gradient import ShardedGradient
from zinf_compile.sharded.offloaded_value import OffloadedValue
from zinf_compile.sharded.parameter import ShardedParameter
from zinf_compile.sharded.tensor import ShardedTensor

_ACCEPTED = (
    "accepted: None, bool, int, float, str, torch.dtype, tensors, numpy's numbers and arrays of numbers, and lists, tuples and "
    "dicts of these (keys: str or int)"
)


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON can hold it; its tensors are added to `tensors` under their own places, such as `extra.lr`, of
    which two that read alike get a number. Numbers of numpy come back as Python's.

    Raises `CheckpointError` naming the place of what is not a plain value.
    """
    if isinstance(value, np.number | np.bool_):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.ndarray):  # the state of numpy's generators has one
        return {"array": _add(_tensor_of(value, where), where, tensors)}
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            raise CheckpointError(f"{where} is a {type(value).__name__} of layout {value.layout}; {_ACCEPTED}{_advice(value)}")
        return {"tensor": _add(value, where, tensors)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}.{number}", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        kind = "counter" if type(value) is Counter else "dict"  # `MultiStepLR` has its milestones in one
        return {kind: [[_key(key, where), encode(item, f"{where}.{key}", tensors)] for key, item in value.items()]}
    raise CheckpointError(f"{where} is a {type(value).__name__}; {_ACCEPTED}")


def _add(tensor: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> str:
    """Add a tensor to `tensors`; return its place."""
    place, others = where, 1
    while place in tensors:  # {"a": {"b.c": x}, "a.b": {"c": y}}
        others += 1
        place = f"{where}#{others}"
    tensors[place] = tensor
    return place


def _tensor_of(array: np.ndarray[Any, Any], where: str) -> torch.Tensor:
    """Return a copy of an array as a tensor, also where its strides are negative or its memory can't be written."""
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError):  # of no numbers, or of the other byte order
        raise CheckpointError(f"{where} is a numpy array of {array.dtype}; {_ACCEPTED}") from None


def _advice(value: torch.Tensor) -> str:
    """Return what to do with a tensor that is partitioned, or somewhere else."""
    if not isinstance(value, OffloadedValue | ShardedGradient | ShardedParameter | ShardedTensor):
        return ""
    return (
        ". It is partitioned: save what it belongs to as a part of the model, as an average by "
        'save(folder, nn.ModuleDict({"model": model, "averaged": averaged}), optimizer)'
    )


def decode(value: Any, where: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what `encode` was given. Raises `CheckpointError` where it is nothing that `encode` returns."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [decode(item, f"{where}.{number}", tensors) for number, item in enumerate(value)]
    if isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if kind == "tensor" and isinstance(content, str) and content in tensors:
            return tensors[content]
        if kind == "array" and isinstance(content, str) and content in tensors:
            tensor = tensors[content]
            return tensor.numpy() if isinstance(tensor, torch.Tensor) else tensor  # `zinf inspect` describes tensors instead
        if kind == "dtype" and isinstance(content, str) and isinstance(found := getattr(torch, content, None), torch.dtype):
            return found
        if kind == "tuple" and isinstance(content, list):
            return tuple(decode(content, where, tensors))
        if kind == "dict" and isinstance(content, list) and all(_is_item(item) for item in content):
            return {key: decode(item, f"{where}.{key}", tensors) for key, item in content}
        if kind == "counter" and isinstance(content, list) and all(_is_item(item) for item in content):
            return Counter({key: decode(item, f"{where}.{key}", tensors) for key, item in content})
    raise CheckpointError(f"{where} in the manifest is {str(value)[:80]!r}, which no save has written: was it edited?")


def _key(key: Any, where: str) -> str | int:
    if isinstance(key, str) or type(key) is int:
        return key
    raise CheckpointError(f"{where} has the key {key!r}, a {type(key).__name__}; {_ACCEPTED}")


def _is_item(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and (isinstance(item[0], str) or type(item[0]) is int)
