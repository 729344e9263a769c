"""Parameters that compiled graphs have used, and that stay ordinary ones because nothing would move."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from zinf_compile.runtime.system.process_wide import process_wide


class _Mark:
    """What a parameter carries that is noted. Pickled with it, it is an empty mapping, which says nothing, and loads anywhere.

    `trained`: a graph that makes gradients has used it. There are no references to the parameter itself: PyTorch swaps no
    tensors that have weak ones, of Python or of C++, as a change of a model's type may.
    """

    def __init__(self, *, trained: bool) -> None:
        self.trained = trained

    def __reduce__(self) -> tuple[type[OrderedDict[Any, Any]], tuple[()]]:
        return OrderedDict, ()


_marks: weakref.WeakSet[_Mark] = process_wide(weakref.WeakSet())


def note_ordinary(parameters: Iterable[torch.Tensor], *, trained: bool) -> None:
    """Note that a compiled graph has used these, at its first call with them; `trained`: one that makes gradients."""
    mark = _Mark(trained=trained)
    _marks.add(mark)
    for parameter in parameters:
        parameter._zinf_ordinary = mark  # type: ignore[attr-defined]


def is_ordinary(parameter: torch.Tensor) -> bool:
    """Say whether nothing of its model was partitioned when a graph that makes gradients used it."""
    mark = _mark_of(parameter)
    return mark is not None and mark.trained


def is_used(parameter: torch.Tensor) -> bool:
    """Say whether nothing of its model was partitioned when any graph used it, as one of an evaluation."""
    return _mark_of(parameter) is not None


def _mark_of(parameter: torch.Tensor) -> _Mark | None:
    mark = getattr(parameter, "_zinf_ordinary", None)
    return mark if type(mark) is _Mark and mark in _marks else None
