"""Frozen dataclasses as JSON and back, checked field by field. `StepProblem` and `Plan` are written and read with it.

write_json(problem, kind="step problem", version=1)
read_json(StepProblem, text, kind="step problem", version=1)
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from zinf_compile.errors import PlanError
from zinf_compile.ir.tiers import Tier

Value = TypeVar("Value")


def write_json(value: Any, *, kind: str, version: int) -> str:
    """Return the value as JSON, a line for each item of its lists. Fields that have their default are left out."""
    body = {"format": f"zinf-compile {kind}", "version": version, **_plain(value)}
    return _text(body, "") + "\n"


def read_json(type_: type[Value], text: str, *, kind: str, version: int) -> Value:
    """Return the value of a type that the text holds; raise `PlanError` naming the first field that is wrong."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"the {kind} is no JSON: {error}") from None
    if not isinstance(body, dict) or body.get("format") != f"zinf-compile {kind}":
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise PlanError(f'the {kind} begins with format {found!r}; accepted: "zinf-compile {kind}"')
    if body.get("version") != version:
        raise PlanError(f"the {kind} has version {body.get('version')!r}; this release reads {version}: make it anew")
    fields = {name: value for name, value in body.items() if name not in ("format", "version")}
    return typing.cast(Value, _read(type_, fields, kind))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.init and getattr(value, field.name) != _default(field)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _text(value: Any, indent: str) -> str:
    """Return JSON in which what holds no list of objects stays on one line."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or (len(flat) + len(indent) < 120 and "{" not in flat[1:]):
        return flat
    inner = indent + "  "
    if isinstance(value, list):
        if any(isinstance(item, dict) for item in value):
            return "[\n" + ",\n".join(inner + json.dumps(item) for item in value) + f"\n{indent}]"
        return flat
    rows = [f"{inner}{json.dumps(key)}: {_text(item, inner)}" for key, item in value.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


@functools.cache
def _hints(type_: type) -> dict[str, Any]:
    return typing.get_type_hints(type_)


def _read(type_: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _read(next(each for each in arguments if each is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise PlanError(f"{where}: {value!r} is no list")
        return tuple(_read(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise PlanError(f"{where}: {value!r} is no object of names and values")
        return {name: _read(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if dataclasses.is_dataclass(type_):
        return _read_fields(typing.cast(type, type_), value, where)
    if type_ is Tier:
        try:
            return Tier(value)
        except (ValueError, TypeError) as error:
            raise PlanError(f"{where}: {error}") from None
    if isinstance(type_, type) and issubclass(type_, enum.Enum):
        accepted = [each.value for each in type_]
        if value not in accepted:
            raise PlanError(f"{where}: {value!r}; accepted: {', '.join(map(repr, accepted))}")
        return type_(value)
    if type_ is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool):
        raise PlanError(f"{where}: {value!r} is no {type_.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"{where}: {value!r} is not finite")
    return value


def _read_fields(type_: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise PlanError(f"{where}: {value!r} is no object of fields")
    hints = _hints(type_)
    fields = {field.name: field for field in dataclasses.fields(type_) if field.init}
    if unknown := value.keys() - fields.keys():
        raise PlanError(f"{where} has no field {', '.join(sorted(map(repr, unknown)))}; accepted: {', '.join(fields)}")
    needed = {name for name, field in fields.items() if _default(field) is dataclasses.MISSING}
    if missing := needed - value.keys():
        raise PlanError(f"{where} lacks {', '.join(sorted(map(repr, missing)))}")
    return type_(**{name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()})
