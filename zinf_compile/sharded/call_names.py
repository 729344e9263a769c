"""Names of calls as the user writes them, from the function or operator that PyTorch hands to an override."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_WRITTEN = {
    "__getitem__": "indexing, parameter[...],",
    "__setitem__": "parameter[...] = value",
    "__contains__": "`in`",
    "__array__": "a conversion to a NumPy array",
    "_local_scalar_dense": "item()",
    "_to_copy": "to()",
    "_unsafe_view": "view()",
    "linalg_vector_norm": "norm()",
    "as_strided": "as_strided()",
    "select": "indexing, grad[...],",
    "slice": "indexing, grad[...],",
    "index": "indexing, grad[...],",
    "unbind": "iterating or unbind()",
}


def call_name(func: Callable[..., Any]) -> str:
    """Return how a call of a function, an operator or a property is written: `norm()`, `.data`, `max()`."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return _plain_name(schema.name.split("::")[-1])
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(getattr(func, "__self__", None), "__name__", "data")
        return f".{owner}" if name == "__get__" else f".{owner} = value"
    return _plain_name(name)


def _plain_name(name: str) -> str:
    if name in _WRITTEN:
        return _WRITTEN[name]
    if name.startswith("__") and name.endswith("__"):
        return f"{name.strip('_')}()"
    return f"{name}()"
