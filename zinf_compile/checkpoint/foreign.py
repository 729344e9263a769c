"""A checkpoint that another program has written, as this package sees it: tensors by name, states of parameters, settings.

Made by `deepspeed_files`, `deepspeed_universal` and `torch_files`; used by `imported_files` and `tensor_sources`.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zinf_compile.errors import CheckpointError

from .torch_archive import ArchivedTensor, TorchArchive

_MOST_VALUES = 1 << 20
"""In what is beside the tensors of a model: one for each value, and for each KiB of tensors."""
_MOST_NESTED = 100


@dataclasses.dataclass(frozen=True)
class Span:
    """Elements of a tensor in a file."""

    tensor: ArchivedTensor
    start: int
    numel: int


class ForeignTensor:
    """A tensor whose elements lie in several files one after the other, in row-major order."""

    def __init__(self, shape: Sequence[int], spans: Sequence[Span]) -> None:
        self.shape = tuple(shape)
        self.spans = [span for span in spans if span.numel]
        self.dtype = spans[0].tensor.dtype if spans else torch.float32
        self._ends = list(itertools.accumulate(span.numel for span in self.spans))

    @property
    def problem(self) -> str:
        """What is wrong with it; "" for nothing."""
        wanted, found = math.prod(self.shape), self._ends[-1] if self._ends else 0
        if wanted != found:
            return f"{found:,} of the {wanted:,} elements of {list(self.shape)} are there"
        beyond = [span for span in self.spans if span.start < 0 or span.start + span.numel > span.tensor.numel()]
        if beyond:
            return f"it lies beyond the {beyond[0].tensor.numel():,} elements of a tensor in {beyond[0].tensor.archive.path}"
        return "" if len({span.tensor.dtype for span in self.spans}) <= 1 else "its parts are of several types"

    def read(self, start: int, into: torch.Tensor) -> None:
        """Fill a flat host tensor with elements from number `start` on, converted to its type."""
        done, number = 0, bisect.bisect_right(self._ends, start)
        while done < into.numel():
            span = self.spans[number]
            first = start + done - (self._ends[number] - span.numel)
            count = min(into.numel() - done, span.numel - first)
            target = into[done : done + count]
            values = target if target.dtype == self.dtype else torch.empty(count, dtype=self.dtype)
            span.tensor.read(span.start + first, values)
            if values is not target:
                target.copy_(values)
            done, number = done + count, number + 1


def whole_of(tensor: ArchivedTensor, shape: Sequence[int] | None = None) -> ForeignTensor:
    """Return a tensor of one file, in another shape if one is given."""
    return ForeignTensor(tensor.shape if shape is None else shape, [Span(tensor, 0, tensor.numel())])


@dataclasses.dataclass
class ForeignOptimizer:
    """States and settings of one optimizer."""

    states: dict[str, dict[str, ForeignTensor]]
    """Of the parameter's size, by name of the parameter."""
    small: dict[str, dict[str, Any]]
    """Others, such as step counts, by name of the parameter."""
    settings: list[dict[str, Any]]
    """By group."""
    groups: list[list[str]] | None
    """Names of the parameters by group; None: not known."""
    numbered: bool = False
    """Parameters have no names but numbers, in the order of the optimizer's groups."""


@dataclasses.dataclass
class ForeignCheckpoint:
    """What is in it; `close` closes its files."""

    path: Path
    tensors: dict[str, ForeignTensor]
    """Parameters and buffers, tied ones once or more often."""
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    """Further names of tied tensors, by the name of one in `tensors`."""
    masters: dict[str, ForeignTensor] = dataclasses.field(default_factory=dict)
    """Parameters in higher precision, which go to a model of any floating-point types."""
    groups: list[dict[str, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    """Shapes of trained parameters by name, by group of the optimizer."""
    optimizers: list[ForeignOptimizer] = dataclasses.field(default_factory=list)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    archives: list[TorchArchive] = dataclasses.field(default_factory=list)

    def check(self) -> None:
        """Raise `CheckpointError` naming every tensor that is not whole."""
        problems = [f"{name}: {t.problem}" for name, t in {**self.tensors, **self.masters}.items() if t.problem]
        for optimizer in self.optimizers:
            problems += [f"{s} of {n}: {t.problem}" for n, own in optimizer.states.items() for s, t in own.items() if t.problem]
        if problems:
            raise CheckpointError(f"{self.path} is damaged, or was not written to its end: {'; '.join(problems)}")

    def close(self) -> None:
        """Close the files."""
        while self.archives:
            self.archives.pop().close()

    def open(self, path: Path) -> Any:
        """Open a file of `torch.save` and return its value."""
        self.archives.append(TorchArchive(path))
        return self.archives[-1].value


def plain(value: Any) -> Any:
    """Return a value without what it has of unknown classes: those are left out of dicts and lists. Tensors are read.

    Raises `CheckpointError` for a value that is nested too deeply, or would be too large.
    """
    return _Plain().of(value, 0)


class _Plain:
    def __init__(self) -> None:
        self._left = _MOST_VALUES

    def of(self, value: Any, depth: int) -> Any:
        self._left -= 1 + (value.numel() * value.dtype.itemsize >> 10 if isinstance(value, ArchivedTensor) else 0)
        if self._left < 0 or depth > _MOST_NESTED:
            raise CheckpointError(
                f"what is saved beside the model is nested too deeply, or has more than {_MOST_VALUES:,} values"
            )
        if isinstance(value, ArchivedTensor):
            return value.whole()
        if isinstance(value, dict):
            return {k: self.of(item, depth + 1) for k, item in value.items() if _is_plain(item) and type(k) in (str, int)}
        if isinstance(value, list | tuple):
            items = [self.of(item, depth + 1) for item in value if _is_plain(item)]
            return items if isinstance(value, list) else tuple(items)
        return value if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | dict | list | tuple | ArchivedTensor)
