"""A parameter that is being materialized: hollow, but initialisers may read and write it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from zinf_compile._torch import TorchDispatchMode, no_torch_function, tree_leaves
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.runtime.lanes.lanes import Pending
from zinf_compile.sharded.hollow_calls import answer_assignment, call_on_values
from zinf_compile.sharded.metadata_calls import reads_metadata

from .parallel_random import Fill, ParallelDraws, is_draw, settings_of
from .shard_writer import PieceWriter

_FILLS = frozenset(
    {
        "uniform_", "normal_", "constant_", "kaiming_uniform_", "zero_", "fill_", "copy_", "exponential_", "random_",
        "log_normal_", "cauchy_", "geometric_", "bernoulli_",
    }
)  # fmt: skip
"""Functions that overwrite all of their first argument: its earlier value need not be loaded."""


_DRAWS = frozenset({"uniform_", "normal_", "kaiming_uniform_"})
"""Those of `_FILLS` that draw all of it by one operator of which it can be noted what it would make."""


class ValueStore(Protocol):
    """The store of a value between the times when it is needed whole."""

    def load(self, into: torch.Tensor) -> None:
        """Fill a flat tensor of the host with the whole value. On several ranks all do so together."""

    def save(self, whole: torch.Tensor) -> Pending:
        """Start to keep this rank's part of a flat tensor of the host, which is the same on all ranks and may not change."""

    def fill(self, fill: Fill, writer: PieceWriter) -> bool:
        """Start to keep this rank's part of what is to be drawn, piece by piece; say whether that can be done here."""


class ValueHolder(Protocol):
    """The holder of the values of materializing parameters: see `materializer.py`."""

    enlist: Callable[[nn.Parameter, str, int], None] | None
    """Makes one more parameter a materializing one, given its name and owner; None: all that will be are here."""

    def whole(self, parameter: MaterializingParameter, *, fills: bool = False) -> torch.Tensor:
        """Return the value in the parameter's shape; where a caller `fills` it, its earlier value is not loaded."""

    def filled(self, parameter: MaterializingParameter) -> None:
        """Note that a caller has filled what it asked for to `fill`."""

    def undo(self, parameter: MaterializingParameter) -> None:
        """Drop memory that a caller failed to fill: the value is the earlier one."""

    def is_open(self, parameter: MaterializingParameter) -> bool:
        """Return whether a value is whole now."""

    def may_defer(self, parameter: MaterializingParameter) -> bool:
        """Return whether the fill of a value may be deferred: nobody has the value, and its elements lie in order."""

    def defer(self, parameter: MaterializingParameter, func: Any, settings: Sequence[float]) -> bool:
        """Note which operator draws a value, for when it is needed; return whether that could be done."""

    def adopt(self, parameter: MaterializingParameter, value: torch.Tensor) -> None:
        """Make a tensor's value the parameter's, whose metadata becomes the tensor's where it isn't settled."""


@dataclasses.dataclass
class Materialization:
    """The record of a parameter until it is partitioned."""

    name: str
    owner: int
    """Identifies the module whose parameters are whole at the same time."""
    place: ValueStore | None
    """None: its value counts for nothing, see `tied` in `from_meta.py`."""
    materializer: ValueHolder
    settled: bool = True
    """There is room for this shape and type, and no other."""
    kept: bool = False
    """There is a value in `place`."""
    filled: bool = False
    """Something gave every element a value."""
    checksum: int = 0


class MaterializingParameter(nn.Parameter):
    """Answers for its metadata as it is; anything else is done to its whole value, which the materializer loads and saves."""

    _zinf_materialization: Materialization

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if reads_metadata(func, args):
            with no_torch_function():
                return func(*args, **(kwargs or {}))
        return _on_whole(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MaterializingParameter({self._zinf_materialization.name}, shape={list(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return another parameter with a copy of the value, where more may come."""
        materialization = self._zinf_materialization
        with torch.no_grad():
            copied = nn.Parameter(self.data.clone(), self.requires_grad)
        if materialization.materializer.enlist is not None:
            materialization.materializer.enlist(copied, materialization.name, id(copied))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedModelError(
            f"parameter {self._zinf_materialization.name} is being partitioned and can't be pickled: save "
            "zinf_compile.full_state_dict(model) once it is"
        )


class _Deferring(TorchDispatchMode):
    """Context in which a draw of a parameter is noted, not made."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note it, or do it."""
        first = args[0] if args else None
        if not isinstance(first, MaterializingParameter):
            return func(*args, **(kwargs or {}))
        if is_draw(func) and not kwargs and first._zinf_materialization.materializer.defer(first, func, settings_of(func, args)):
            return first
        return _on_whole(func, args, kwargs or {}, deferred=False)


def _on_whole(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, deferred: bool = True) -> Any:
    name = getattr(func, "__name__", "").partition(".")[0]
    parameters = [item for item in tree_leaves((args, kwargs)) if isinstance(item, MaterializingParameter)]
    first = args[0] if args else kwargs.get("tensor")  # torch.nn.init hands on keywords
    if parameters:
        assignment = answer_assignment(name, args, parameters[0], assign=partial(_assign, parameters[0]))
        if assignment is not NotImplemented:
            return assignment
    fills = name in _FILLS and isinstance(first, MaterializingParameter) and sum(item is first for item in parameters) == 1
    if (
        deferred
        and fills
        and name in _DRAWS
        and len(parameters) == 1
        and parameters[0]._zinf_materialization.materializer.may_defer(parameters[0])
    ):
        with no_torch_function(), _Deferring():
            return func(*args, **kwargs)
    target = first if fills and isinstance(first, MaterializingParameter) else None
    was_open = target is not None and target._zinf_materialization.materializer.is_open(target)
    with torch.no_grad():
        wholes = [(p, p._zinf_materialization.materializer.whole(p, fills=fills and p is first)) for p in parameters]
    try:
        with ParallelDraws() if fills else contextlib.nullcontext():
            result = call_on_values(func, args, kwargs, wholes)
    except BaseException:
        if target is not None and not was_open:
            target._zinf_materialization.materializer.undo(target)
        raise
    if target is not None:
        target._zinf_materialization.materializer.filled(target)
    return result


def _assign(parameter: MaterializingParameter, value: torch.Tensor) -> None:
    """Do `parameter.data = value`."""
    materialization = parameter._zinf_materialization
    with torch.no_grad():
        materialization.materializer.adopt(parameter, value.detach().cpu())
