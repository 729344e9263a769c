"""A tensor that is partitioned like a parameter: averages, slow weights, perturbations, and what is computed from parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from zinf_compile._torch import inside_dynamo, never_compile_alone, no_torch_function, tree_leaves
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.units.shard_layout import DenseLayout
from zinf_compile.runtime.units.shard_values import ParameterShard, ShardValues, pieces_of
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.runtime.units.whole import gather_whole

from .data_assignment import replaced

_READ_MEMORY = frozenset(
    [
        "__array__",
        "__dlpack__",
        "data_ptr",
        "numpy",
        "pin_memory",
        "share_memory_",
        "storage",
        "tolist",
        "untyped_storage",
    ]
)  # fmt: skip
"""Methods that read memory past every operator."""

_handed_out: weakref.WeakKeyDictionary[Unit, weakref.WeakSet[ParameterShard]] = process_wide(weakref.WeakKeyDictionary())
"""The shards that tensors have of a parameter's own values."""

_lock = threading.RLock()  # a finaliser may come from inside

_refusals: weakref.WeakSet[PartitionedParameterError] = weakref.WeakSet()


class ShardedTensor(torch.Tensor):
    """A tensor of which this rank holds 1/N, the same elements as of a partitioned parameter, on the tier of that parameter.

    Element-wise operators, also in place and in their foreach forms, work on the shards, with parameters, gradients and other
    tensors that are partitioned alike. Sums, norms, dot products, extremes and comparisons take the shards of all ranks: these
    are collective operations. For anything else values are gathered on one rank, and on several inside of compiled calls;
    elsewhere `full_tensor()`, on all ranks, gathers them.
    """

    lost_gradient = False
    """Whether a tensor that requires grad was copied to it: what is computed from it would lack that one's gradient."""
    answered_by_parameter = False
    """Whether it stands in a call for a parameter, which loads or gathers its values itself where the call needs them whole."""
    _unit: Unit
    _shard_values: ShardValues
    _answer: ClassVar[Callable[..., Any]]
    """Performs an operator of which an argument is a `ShardedTensor`; set in `dispatch.py`."""
    _answer_call: ClassVar[Callable[..., Any]]
    """Performs a call of user code, before autograd sees it; set in `dispatch.py`."""

    @staticmethod
    def __new__(cls, values: ShardValues, shape: Sequence[int], stride: Sequence[int]) -> ShardedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides=tuple(stride), dtype=values.dtype, device=values.unit.device, requires_grad=False
        )

    def __init__(self, values: ShardValues, shape: Sequence[int], stride: Sequence[int]) -> None:
        self._unit, self._shard_values = values.unit, values

    @property
    def unit(self) -> Unit:
        """The parameter that it is partitioned like."""
        return self._unit

    @property
    def shard_values(self) -> ShardValues:
        """This rank's elements."""
        values = self._shard_values
        if isinstance(values, ParameterShard) and values.replaced is not None:
            values = self._shard_values = values.replaced
        return values

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter's own values."""
        return isinstance(self.shard_values, ParameterShard)

    def local(self) -> torch.Tensor:
        """Return this rank's shard on the device, flat, with its padding; a copy if it is kept elsewhere."""
        if self.shard_values.resident is not None:
            self.shard_values.changing()  # by whom it is handed out to, perhaps
            if self.is_parameter:
                self._unit.context.full_copies.hand_out(self._unit)
        return self._read()

    def _read(self) -> torch.Tensor:
        """Return the same, only to be read."""
        resident = self.shard_values.resident
        if resident is not None:
            return resident
        context = self._unit.context
        shard = context.memory.staged_buffer(self._unit.shard_numel, self.dtype)
        with context.lanes.meter.waiting(), torch.no_grad():
            for start, end in pieces_of(self._unit):
                shard[start:end].copy_(self.shard_values.fetch(start, end)())
        return shard.to(self._unit.device)

    def full_tensor(self) -> torch.Tensor:
        """Return the whole tensor on every rank. A collective operation."""
        context, dense = self._unit.context, DenseLayout(self.shape, self.stride(), self.dtype, self.device)
        self._unit.ranks.agree(self.describe("full_tensor"), what="gathering a tensor")
        with torch.no_grad():
            shard = self._read()
            if self._unit.shard_group.size == 1:
                return dense.logical(shard if self.shard_values.resident is None else shard.clone())
            full = context.full_buffer(self._unit.numel, self.dtype, self.device)
            gather_whole(self._unit, shard, full, f"gathering a tensor partitioned like {self._unit.name}")
            return dense.logical(full)

    def replace(self, value: torch.Tensor) -> None:
        """Perform `tensor.data = value`: this tensor alone has other values from now on, in memory of its own."""
        if value is not self:
            other = replaced(self, value, f"a tensor partitioned like parameter {self._unit.name}")
            assert isinstance(other, ShardedTensor), "a copy is partitioned alike"
            self._shard_values, self.lost_gradient = other.shard_values, other.lost_gradient

    def describe(self, operator: str) -> list[str]:
        """Return what ranks compare before they do something together with it."""
        what = "parameter" if self.is_parameter else "a tensor partitioned like parameter"
        return [f"{operator}() of {what} {self._unit.name}, unit {self._unit.serial}, changes {self.shard_values.changes:08x}"]

    def refuse(self, operator: str, because: str = "", *, answered_by_whole: bool = False) -> NoReturn:
        """Raise the error of an operation that needs whole values.

        `answered_by_whole`: they are all that it needs, whatever else is said; so it is where no reason is given.
        """
        unit = self._unit
        where = f"spread over {unit.shard_group.size} ranks" if unit.shard_group.size > 1 else "kept off the device"
        if self.is_parameter:
            subject = f"{operator}() reads parameter {unit.name}, shape {list(self.shape)}, whose values are {where}"
            way = "`with zinf_compile.gathered(model):`, on all ranks, has them whole (write=True to change them)"
        else:
            subject = f"{operator}() reads a tensor partitioned like parameter {unit.name}, shape {list(self.shape)}, {where}"
            way = "full_tensor(), on all ranks, returns it whole"
        error = PartitionedParameterError(
            f"{subject}{because and '; ' + because}. Accepted: element-wise operators with scalars and with tensors of the same "
            f"shape and strides, sums, norms and dot products over all elements; for anything else {way}"
        )
        if answered_by_whole or not because:
            _refusals.add(error)
        raise error

    def as_subclass(self, cls: type[Any]) -> NoReturn:
        self.refuse("as_subclass")  # torch's own looks past __torch_function__

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        group = self._unit.shard_group
        return (
            f"ShardedTensor(like {self._unit.name}, shape={list(self.shape)}, dtype={self.dtype}, "
            f"rank {group.rank} of {group.size})"
        )

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = self.clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("pickle", "a rank's shard alone is of no use in a file")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, nn.Parameter) for kind in types):
            return NotImplemented  # the parameter's own answers
        if func is torch.Tensor.untyped_storage and (torch.compiler.is_compiling() or inside_dynamo()):
            # Dynamo describes a parameter with its gradient, which may be such a tensor: it reads nothing of the memory
            with no_torch_function():
                return func(*args)
        return cls._answer_call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls._answer(func, args, kwargs or {})


for _function in (ShardedTensor.__torch_function__, ShardedTensor.__torch_dispatch__):
    never_compile_alone(_function.__func__)  # type: ignore[union-attr]


def first_sharded(args: Any) -> ShardedTensor | None:
    """Return the first partitioned tensor among arguments."""
    return next((item for item in tree_leaves(args) if isinstance(item, ShardedTensor)), None)


def is_refusal(error: PartitionedParameterError) -> bool:
    """Return whether an error means that an operation needs whole values, and says no more than that."""
    return error in _refusals


def reads_memory(name: str) -> bool:
    """Return whether a method reads memory past every operator."""
    return name in _READ_MEMORY


def parameter_values(unit: Unit) -> ShardedTensor:
    """Return a parameter's own values: what is done to them in place is done to the parameter."""
    shard = ParameterShard(unit)
    with _lock:
        _handed_out.setdefault(unit, weakref.WeakSet()).add(shard)
    return ShardedTensor(shard, unit.shape, unit.stride)


def assign_values(unit: Unit, value: torch.Tensor) -> None:
    """Perform `parameter.data = value`: what was taken from `parameter.data` before keeps its values, in memory of its own."""
    with _lock:
        earlier = [shard for shard in _handed_out.get(unit, ()) if shard.replaced is None]
    if isinstance(value, ShardedTensor) and value.shard_values in earlier and value.stride() == unit.stride:
        return  # its own values
    target = parameter_values(unit)
    with torch.no_grad():
        copy = target.clone() if earlier else None
        target.copy_(value)
    for shard in earlier:
        assert isinstance(copy, ShardedTensor), "it is partitioned alike"
        shard.replaced = copy.shard_values


def same_values(tensor: ShardedTensor) -> ShardedTensor:
    """Return another tensor object with the same values."""
    with no_torch_function():
        return ShardedTensor(tensor.shard_values, tensor.shape, tensor.stride())
