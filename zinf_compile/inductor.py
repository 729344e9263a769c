"""Compile regions through Inductor, each distinct structure once."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ._torch import compile_with_inductor
from .passes.lower import run_by_operator

Compiled = Callable[[list[Any]], Sequence[Any]]

_compiled: dict[tuple[Any, ...], Compiled] = {}
_lock = threading.Lock()
_warned: set[str] = set()


class InductorRegions:
    """Compiles the regions of one graph. Equal regions, of this graph or an earlier one, share one compilation."""

    def __init__(self, *, backward: bool) -> None:
        self._backward = backward

    def __call__(self, region: fx.GraphModule) -> Compiled:
        if not any(isinstance(node.meta.get("val"), torch.Tensor) for node in region.graph.nodes if node.op != "output"):
            return run_by_operator(region)
        key = (self._backward, *structure(region))
        with _lock:
            if key not in _compiled:
                _compiled[key] = self._compile(region)
            return _compiled[key]

    def _compile(self, region: fx.GraphModule) -> Compiled:
        try:
            return compile_with_inductor(region, backward=self._backward)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if reason not in _warned:
                _warned.add(reason)
                warnings.warn(
                    f"Inductor can't compile a region of the model ({reason}); it runs operator by operator", stacklevel=2
                )
            return run_by_operator(region)


def structure(region: fx.GraphModule) -> tuple[Any, ...]:
    """Return what makes two regions the same to a compiler: operators, how they are wired, and the form of the inputs."""
    number: dict[fx.Node, int] = {}
    key: list[Any] = []
    for node in region.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder":
            key.append(_form(node.meta.get("val")))
        elif node.op == "get_attr":
            key.append(("attribute", id(getattr(region, str(node.target), None)), str(node.target)))
        else:
            wired = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
            key.append((node.op, str(node.target), repr(wired), _form(node.meta.get("val"))))
    return tuple(key)


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        symbols = any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
        home = _home_of(value.shape) or _home_of(value.stride()) if symbols else None  # symbols mean something in one graph only
        return (str(value.dtype), str(value.device), str(tuple(value.shape)), str(tuple(value.stride())), home)
    if isinstance(value, (list, tuple)):
        return tuple(_form(item) for item in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (str(value), _home_of([value]))
    return repr(value)


def _home_of(sizes: Sequence[Any]) -> int | None:
    return next((id(size.node.shape_env) for size in sizes if hasattr(size, "node")), None)
