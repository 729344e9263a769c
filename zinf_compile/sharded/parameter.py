"""A partitioned parameter as the user's code sees it: the same object, hollow, answering for its metadata only."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from zinf_compile._torch import (
    by_backend_of_pytorch,
    graph_break,
    inside_dynamo,
    never_compile_alone,
    no_torch_function,
    tensor_on_storage,
)
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.ir.formats import format_of
from zinf_compile.runtime.units.twin import twin_of
from zinf_compile.runtime.units.unit import Unit

from .data_assignment import assign, reject_reshape
from .eager_gradients import reduce_whole_gradients
from .held_values import forget, hold, no_longer_in_use
from .metadata_calls import OFTEN, reads_metadata
from .parameter_ops import makes_companion

_unit_of_memory: weakref.WeakValueDictionary[tuple[int, int], Unit] = weakref.WeakValueDictionary()
"""Unit by the address of its parameter's storage, which is hollow or held, and the offset in it."""

_ALWAYS_MAPPED_BYTES = (32 << 20) + 4096
"""A size that glibc never takes from its heap, where each parameter would leave a hole: untouched, but counted by RLIMIT_DATA."""


_GRAD: Any = torch.Tensor.grad


class ShardedParameter(nn.Parameter):
    """A parameter of which each rank holds 1/N, and compiled graphs gather the rest.

    Its class is set in place: optimizers, modules and references made earlier keep working. Eager code may read its metadata
    at any time. On a single rank it may read and write the value too. On several ranks, or where the value is off the device,
    element-wise operations and reductions work on shards; for the rest values are gathered on one rank, and on several inside of
    compiled calls. What remains raises `PartitionedParameterError` naming the parameter and the way out.
    """

    _zinf_unit: Unit
    _answer_call: ClassVar[Callable[..., Any]]
    """Performs an eager call that needs more than metadata; set in `dispatch.py`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling() and inside_dynamo():  # not another thread
            if by_backend_of_pytorch():  # whose code would read the hollow memory: the call runs between two graphs
                graph_break(
                    "a parameter that zero_infinity has partitioned is used in code that another backend compiles: the call runs "
                    'eagerly. Compile that code with backend="zero_infinity", or not at all'
                )
            with no_torch_function():
                # In the code of methods such as `norm` and `__rsub__` Dynamo sees an override here, too: they get a plain view.
                if isinstance(func, FunctionType) and func.__module__ == "torch._tensor":
                    plain = [item.view_as(item) if isinstance(item, ShardedParameter) else item for item in args]
                    return getattr(plain[0], func.__name__)(*plain[1:], **(kwargs or {}))
                return func(*args, **(kwargs or {}))
        if func in OFTEN or (reads_metadata(func, args) and not makes_companion(func, args, kwargs or {})):
            with no_torch_function():
                return func(*args, **(kwargs or {}))
        return cls._answer_call(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        unit = self._zinf_unit
        if unit.context.closed:
            return f"ShardedParameter({unit.name}, shape={list(unit.shape)}, dtype={unit.dtype}, gone with zinf_compile.reset())"
        if unit.at_hand:
            with no_torch_function():
                learns = self.requires_grad
            return f"Parameter containing:\n{unit.whole().detach().requires_grad_(learns)!r}"
        return (
            f"ShardedParameter({unit.name}, shape={list(unit.shape)}, dtype={unit.dtype}, "
            f"rank {unit.shard_group.rank} of {unit.shard_group.size})"
        )

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; every loop over parameters asks for it, and `__torch_function__` takes five times as long."""
        with no_torch_function():
            return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with no_torch_function():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with no_torch_function():
            _GRAD.__delete__(self)

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else super().__format__(spec)

    def as_subclass(self, cls: type[Any]) -> Any:
        return self.detach().as_subclass(cls)  # torch's own looks at the memory of `self`, past __torch_function__

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a twin that is partitioned alike; each rank copies its own shard."""
        if id(self) not in memo:
            with torch.inference_mode(False), no_torch_function():
                twin = nn.Parameter(hollow_tensor(self._zinf_unit), requires_grad=self.requires_grad)
            hollow_out(twin, twin_of(self._zinf_unit, twin))
            memo[id(self)] = twin
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PartitionedParameterError(
            f"parameter {self._zinf_unit.name} is partitioned and can't be pickled: save zinf_compile.full_state_dict(model) "
            "(on one process also model.state_dict()) instead of the model"
        )

    def set_(self, *source: Any) -> Any:  # torch's own comes past __torch_function__
        if torch.compiler.is_compiling() and inside_dynamo():
            return super().set_(*source)
        if len(source) != 1 or not isinstance(source[0], torch.Tensor):
            reject_reshape(torch.Tensor.set_, self._zinf_unit)
        assign_data(self, source[0])
        return self

    def share_memory_(self) -> NoReturn:
        raise PartitionedParameterError(
            f"parameter {self._zinf_unit.name} is partitioned and can't be moved to shared memory: share a plain model that has "
            "loaded zinf_compile.full_state_dict(model)"
        )


def hollow_out(parameter: nn.Parameter, unit: Unit, *, held: torch.Tensor | None = None) -> None:
    """Make the parameter hollow: same object, shape, strides, type and device, 0 bytes of storage.

    `held`: its whole values, which stay its memory for as long as a backward of eager code needs them (`held_values`).
    """
    with torch.no_grad(), no_torch_function():
        if held is None:
            parameter.data = hollow_tensor(unit)
        else:
            hold(parameter, held)
        _unit_of_memory[parameter.untyped_storage()._cdata, int(parameter.storage_offset())] = unit
    parameter._zinf_unit = unit  # type: ignore[attr-defined]
    parameter.__class__ = ShardedParameter
    if unit.shard_group.size > 1 and unit.dtype.is_floating_point:
        with no_torch_function():
            reduce_whole_gradients(parameter)


def fill(parameter: ShardedParameter, full: torch.Tensor) -> None:
    """Make a hollow parameter an ordinary one that holds `full`; its unit stays attached."""
    forget(parameter)
    with torch.no_grad(), no_torch_function():
        parameter.data = full
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def has_gradient(parameter: torch.Tensor) -> bool:
    """Say whether a parameter has a gradient, where `no_torch_function` is in force already: for loops over all of a model."""
    return _GRAD.__get__(parameter) is not None


def drop_held_values(*, stepped: bool = False) -> None:
    """Make those parameters hollow whose whole values no backward of eager code needs any more; `stepped`: behind a step."""
    for parameter in no_longer_in_use(stepped=stepped):
        with torch.inference_mode(False):
            hollow_out(parameter, parameter._zinf_unit)  # type: ignore[attr-defined]


def hollow_tensor(like: Unit | torch.Tensor, *, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor with the logical metadata of a unit or tensor, on its device or another, and a storage of 0 bytes."""
    stride = like.stride() if isinstance(like, torch.Tensor) else like.stride
    device = device or like.device
    tensor = torch.empty(0, dtype=like.dtype, device=device)
    if device.type not in ("cpu", "meta"):
        return tensor_on_storage(tensor, tuple(like.shape), stride)
    extent = sum((size - 1) * step for size, step in zip(like.shape, stride, strict=True)) + 1
    if device.type == "cpu":  # no way to these strides but through memory, which is never touched
        extent = max(extent, format_of(like.dtype).numel_within(_ALWAYS_MAPPED_BYTES))
    tensor.set_(torch.empty(max(0, extent), dtype=like.dtype, device=device).untyped_storage(), 0, tuple(like.shape), stride)
    tensor.untyped_storage().resize_(0)
    return tensor


def unit_of(tensor: object) -> Unit | None:
    """Return the unit of a partitioned parameter (hollow, or filled inside `gathered`), None for anything else."""
    unit = getattr(tensor, "_zinf_unit", None) if isinstance(tensor, nn.Parameter) else None
    return unit if isinstance(unit, Unit) else None


def unit_behind(tensor: torch.Tensor) -> Unit | None:
    """Return the unit of a hollow parameter, or of a hollow alias of one that autograd keeps."""
    if isinstance(tensor, ShardedParameter):
        return tensor._zinf_unit
    storage = tensor.untyped_storage()
    unit = _unit_of_memory.get((storage._cdata, int(tensor.storage_offset())))
    if unit is None or storage.nbytes() == 0:
        return unit
    parameter = unit.parameter()  # which may hold its whole values for now; another tensor may have taken a freed one's address
    return unit if parameter is not None and parameter.untyped_storage()._cdata == storage._cdata else None


def assign_data(parameter: ShardedParameter, value: torch.Tensor) -> None:
    """Perform `parameter.data = value`."""
    if value is not parameter:
        check_assignable(parameter, value)
        assign(parameter._zinf_unit, value._zinf_unit.whole() if isinstance(value, ShardedParameter) else value)


def check_assignable(parameter: ShardedParameter, value: torch.Tensor) -> None:
    """Raise `PartitionedParameterError` unless the parameter is at hand and `value` has its shape, type and device."""
    unit = parameter._zinf_unit
    same = tuple(value.shape) == unit.shape and value.dtype == unit.dtype and value.device == unit.device
    if same and not unit.at_hand:
        raise PartitionedParameterError(
            f"parameter {unit.name} is spread over ranks or kept off the device, and can't take over the memory of a tensor: "
            "`parameter.data = value` gives it the values of one that is partitioned alike, on one rank also of a plain one; "
            "change values, on all ranks, inside `with zinf_compile.gathered(model, write=True):`"
        )
    if tuple(value.shape) != unit.shape:
        raise PartitionedParameterError(
            f"parameter {unit.name} is partitioned as {list(unit.shape)}; assigning data of shape {list(value.shape)} is not "
            "possible. Resize it before its first compiled call (by resize_token_embeddings, too), or replace its module by a "
            "new one, such as `model.head = nn.Linear(...)`, and make a new optimizer"
        )
    if not same:
        raise PartitionedParameterError(
            f"parameter {unit.name} is partitioned as {list(unit.shape)} {unit.dtype} on {unit.device}; assigning its data "
            f"({list(value.shape)} {value.dtype} on {value.device}) is not possible. Convert or move the model before its first "
            "compiled call, or use autocast (for transformers' Trainer bf16=True, in the place of bf16_full_eval), and change "
            "values inside `with zinf_compile.gathered(model, write=True):`"
        )


# Compiled alone, `__torch_function__` would take what runs between two graphs for captured, and read hollow memory.
for _function in (ShardedParameter.__torch_function__.__func__, makes_companion):  # type: ignore[attr-defined]
    never_compile_alone(_function)


def _method(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs)

    return method


# Dynamo calls a method that the subclass defines. Looking up one that only `Tensor` defines, in Python (`split`, `norm`), is an
# error in PyTorch 2.11 and breaks the graph in later ones.
for _name, _plain in vars(torch.Tensor).items():
    if isinstance(_plain, FunctionType) and not _name.startswith("_") and _name not in vars(ShardedParameter):
        setattr(ShardedParameter, _name, _method(_plain))
