"""JSON as strict as the Rust reader of safetensors: no duplicate keys, no NaN, no lone surrogates."""

from __future__ import annotations

import json
import math
from typing import Any

_MOST_NESTED = 127


def parse_object(text: str) -> dict[str, Any]:
    """Return a JSON object; raise `ValueError` for text that isn't JSON, `TypeError` for other JSON values."""
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole_number
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__}, not an object")
    text.encode()
    _check(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is in it twice")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value


def _whole_number(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)


def _check(value: Any) -> None:
    """Raise `ValueError` for lone surrogates and for values nested too deeply."""
    level: list[Any] = [value]
    for _ in range(_MOST_NESTED):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += [*each, *each.values()]
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, str):
                each.encode()  # raises for a lone surrogate
        if not inner:
            return
        level = inner
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError("it is nested too deeply")
