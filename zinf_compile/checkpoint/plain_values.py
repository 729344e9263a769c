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
_MOST_LEVELS = 125
"""Lists and objects of JSON around one value: with the two around `extra` in a manifest, as many as `strict_json` reads."""
_MOST_DIGITS = 4300
"""Of whole numbers: more of them no Python reads, unless it is told to."""
_TOO_LARGE = 10**_MOST_DIGITS


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor], *, levels: int = _MOST_LEVELS) -> Any:
    """Return a value as JSON can hold it; its tensors are added to `tensors` under their own places, such as `extra.lr`, of
    which two that read alike get a number. Numbers of numpy come back as Python's. `levels`: of JSON that it may take.

    Raises `CheckpointError` naming the place of what is not a plain value, is nested too deeply, or is too large a number.
    """
    if isinstance(value, np.number | np.bool_):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        _check_digits(value, where)
        return value
    if isinstance(value, str):
        return _encoded_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) in (np.ndarray, np.memmap):  # the state of numpy's generators has one
        return {"array": _add(_tensor_of(value, where), where, tensors)}
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            raise CheckpointError(f"{where} is a {type(value).__name__} of layout {value.layout}; {_ACCEPTED}{_advice(value)}")
        if value.is_meta:
            raise CheckpointError(f"{where} is a tensor on meta, without values; {_ACCEPTED}")
        return {"tensor": _add(value, where, tensors)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        left = _levels_left(where, levels, 1 if isinstance(value, list) else 2)
        items = [encode(item, f"{where}.{number}", tensors, levels=left) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        kind = "counter" if type(value) is Counter else "dict"  # `MultiStepLR` has its milestones in one
        left = _levels_left(where, levels, 3)
        return {
            kind: [
                [_key(key, where), encode(item, f"{where}.{readable(key)}", tensors, levels=left)] for key, item in value.items()
            ]
        }
    raise CheckpointError(f"{where} is a {type(value).__name__}; {_ACCEPTED}")


def readable(name: str | int) -> str:
    """Return a name as UTF-8 can hold it: surrogates, as in names of files that aren't UTF-8, are spelt out."""
    return str(name).encode(errors="backslashreplace").decode()


def _encoded_text(value: str) -> str | dict[str, str]:
    """Return a text, or its bytes where it has surrogates, which UTF-8 can't hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"text": value.encode(errors="surrogatepass").hex()}
    return value


def _decoded_text(value: Any) -> str | None:
    """Return the text of which `_encoded_text` has returned the bytes; None for anything else."""
    if not isinstance(value, dict) or value.keys() != {"text"} or not isinstance(value["text"], str):
        return None
    try:
        return bytes.fromhex(value["text"]).decode(errors="surrogatepass")
    except ValueError:
        return None


def _check_digits(value: int, where: str) -> None:
    if abs(value) >= _TOO_LARGE:
        raise CheckpointError(
            f"{where} is a whole number of {value.bit_length():,} bits; accepted: at most {_MOST_DIGITS:,} digits. Save it as a "
            "str, by hex()"
        )


def _levels_left(where: str, levels: int, taken: int) -> int:
    """Return the levels that are left inside of a value that takes some. Raises `CheckpointError` where none is."""
    if taken < levels:
        return levels - taken
    place = where if len(where) <= 80 else f"{where[:77]}..."
    raise CheckpointError(
        f"{place} is nested too deeply; accepted: {_MOST_LEVELS} levels, of which a dict takes three, a tuple two, a list one. "
        "Save what is inside of it under keys of its own"
    )


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
        if (text := _decoded_text(value)) is not None:
            return text
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
            return {decode(key, where, {}): decode(item, f"{where}.{key}", tensors) for key, item in content}
        if kind == "counter" and isinstance(content, list) and all(_is_item(item) for item in content):
            return Counter({decode(key, where, {}): decode(item, f"{where}.{key}", tensors) for key, item in content})
    raise CheckpointError(f"{where} in the manifest is {str(value)[:80]!r}, which no save has written: was it edited?")


def _key(key: Any, where: str) -> str | int | dict[str, str]:
    if isinstance(key, str):
        return _encoded_text(key)
    if type(key) is int:
        _check_digits(key, f"a key of {where}")
        return key
    raise CheckpointError(f"{where} has the key {key!r}, a {type(key).__name__}; {_ACCEPTED}")


def _is_item(item: Any) -> bool:
    if not isinstance(item, list) or len(item) != 2:
        return False
    return isinstance(item[0], str) or type(item[0]) is int or _decoded_text(item[0]) is not None
