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

    There are no references to the parameter itself: PyTorch swaps no tensors that have weak ones, of Python or of C++, as a
    change of a model's type may.
    """

    def __reduce__(self) -> tuple[type[OrderedDict[Any, Any]], tuple[()]]:
        return OrderedDict, ()


_marks: weakref.WeakSet[_Mark] = process_wide(weakref.WeakSet())


def note_ordinary(parameters: Iterable[torch.Tensor]) -> None:
    """Note that a compiled graph has used these, at its first call with them."""
    mark = _Mark()
    _marks.add(mark)
    for parameter in parameters:
        parameter._zinf_ordinary = mark  # type: ignore[attr-defined]


def is_ordinary(parameter: torch.Tensor) -> bool:
    """Say whether it is noted: nothing of its model was partitioned when a graph used it."""
    mark = getattr(parameter, "_zinf_ordinary", None)
    return type(mark) is _Mark and mark in _marks
