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
    """Compiles the regions of one graph. Equal regions, of this graph or an earlier one, share one compilation.

    Symbolic sizes and attributes mean something in their own graph only: regions that have them share within it.
    """

    def __init__(self, *, backward: bool) -> None:
        self._backward = backward
        self._own: dict[tuple[Any, ...], Compiled] = {}

    def __call__(self, region: fx.GraphModule) -> Compiled:
        if not any(isinstance(node.meta.get("val"), torch.Tensor) for node in region.graph.nodes if node.op != "output"):
            return run_by_operator(region)
        key = (self._backward, *structure(region))
        known = self._own if _belongs_to_its_graph(region) else _compiled
        with _lock:
            if key not in known:
                known[key] = self._compile(region)
            return known[key]

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
            key.append(("attribute", str(node.target)))
        else:
            wired = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
            key.append((node.op, str(node.target), repr(wired), _form(node.meta.get("val"))))
    return tuple(key)


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), str(value.device), str(tuple(value.shape)), str(tuple(value.stride())))
    if isinstance(value, (list, tuple)):
        return tuple(_form(item) for item in value)
    return repr(value)


def _belongs_to_its_graph(region: fx.GraphModule) -> bool:
    return any(node.op == "get_attr" or _is_symbolic(node.meta.get("val")) for node in region.graph.nodes)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    if isinstance(value, (list, tuple)):
        return any(_is_symbolic(item) for item in value)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
