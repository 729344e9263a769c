"""A partitioned parameter as the user's code sees it: the same object, hollow, answering for its metadata only."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from zinf_compile._frames import calling_methods
from zinf_compile._torch import (
    limited_frame,
    never_compile_alone,
    no_torch_function,
    packs_for_recomputation,
    tree_leaves,
    tree_map,
)
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.lanes.lanes import Done
from zinf_compile.runtime.transfer.swap import take_away
from zinf_compile.runtime.units.twin import twin_of
from zinf_compile.runtime.units.unit import Unit

from .call_names import call_name
from .data_assignment import assign, changed_parameters, reject_reshape
from .gradient import ShardedGradient
from .offloaded_value import value_of as offloaded_value
from .parameter_ops import makes_companion, on_shards
from .recompile_limit import warn_of_eager_frame

_METADATA = frozenset(
    [
        "size",
        "stride",
        "dim",
        "numel",
        "nelement",
        "ndimension",
        "element_size",
        "storage_offset",
        "untyped_storage",
        "get_device",
        "has_names",
        "type",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "__hash__",
        "__len__",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
        "result_type",
        "increment_version",
        "_increment_version",
    ]
)
"""Functions that read a parameter's metadata, never its value; `is_*` and `_is_*` besides."""

_READS_DESPITE_ITS_NAME = frozenset({"is_nonzero", "_is_all_true", "_is_any_true"})
_homes: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
"""Unit by the address of its parameter's hollow storage."""

_ALWAYS_MAPPED_BYTES = (32 << 20) + 4096
"""What glibc never takes from its heap, where each parameter would leave a hole: untouched, but counted by RLIMIT_DATA."""

_VALUE_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_DETACHED = (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
_ON_OFFLOADED = (*_DETACHED, torch.Tensor.copy_)
"""What of a parameter off the device, on one process, has a value that is brought when it is read: `state_dict` and loading."""
_CONVERSIONS = {
    "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64,
}  # fmt: skip


class ShardedParameter(nn.Parameter):
    """A parameter of which each rank holds 1/N, and compiled graphs gather the rest.

    Its class is set in place: optimizers, modules and references made earlier keep working. Eager code may read its metadata
    at any time. On a single rank it may read and write the value too. On several ranks, or where the value is off the device,
    element-wise operations and reductions work on shards; the rest raises `PartitionedParameterError` naming the parameter and
    the way out.
    """

    _zinf_unit: Unit

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling() or (reads_metadata(func, args) and not makes_companion(func, args, kwargs or {})):
            with no_torch_function():
                return func(*args, **(kwargs or {}))
        return _eager(func, args, kwargs or {})

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
            f"rank {unit.context.rank} of {unit.context.size})"
        )

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
        if torch.compiler.is_compiling():
            return super().set_(*source)
        if len(source) != 1 or not isinstance(source[0], torch.Tensor):
            reject_reshape(torch.Tensor.set_, self._zinf_unit)
        _assign_data(self, source[0])
        return self

    def share_memory_(self) -> NoReturn:
        raise PartitionedParameterError(
            f"parameter {self._zinf_unit.name} is partitioned and can't be moved to shared memory: share a plain model that has "
            "loaded zinf_compile.full_state_dict(model)"
        )


def hollow_out(parameter: nn.Parameter, unit: Unit) -> None:
    """Make the parameter hollow: same object, shape, strides, type and device, 0 bytes of storage."""
    with torch.no_grad(), no_torch_function():
        parameter.data = hollow_tensor(unit)
        _homes[parameter.untyped_storage()._cdata] = unit
    parameter._zinf_unit = unit  # type: ignore[attr-defined]
    parameter.__class__ = ShardedParameter


def fill(parameter: ShardedParameter, full: torch.Tensor) -> None:
    """Make a hollow parameter an ordinary one that holds `full`; its unit stays attached."""
    with torch.no_grad(), no_torch_function():
        parameter.data = full
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def hollow_tensor(like: Unit | torch.Tensor, *, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor with the logical metadata of a unit or tensor, on its device or another, and a storage of 0 bytes."""
    stride = like.stride() if isinstance(like, torch.Tensor) else like.stride
    device = device or like.device
    tensor = torch.empty(0, dtype=like.dtype, device=device)
    extent = sum((size - 1) * step for size, step in zip(like.shape, stride, strict=True)) + 1
    if device.type == "cpu":  # no way to these strides but through memory, which is never touched
        extent = max(extent, _ALWAYS_MAPPED_BYTES // like.dtype.itemsize)
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
    return _homes.get(storage._cdata) if storage.nbytes() == 0 else None


def reads_metadata(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Say whether a call reads what a tensor is, not its value."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        return getattr(owner, "__name__", "") not in _VALUE_PROPERTIES
    if name == "type":
        return len(args) == 1
    return name in _METADATA or (name.startswith(("is_", "_is_")) and name not in _READS_DESPITE_ITS_NAME)


# Compiled alone, `__torch_function__` would take what runs between two graphs for captured, and read hollow memory.
for _function in (ShardedParameter.__torch_function__.__func__, reads_metadata, makes_companion):  # type: ignore[attr-defined]
    never_compile_alone(_function)


def _method(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs)

    return method


# Dynamo calls a method that the subclass defines. Looking up one that only `Tensor` defines, in Python (`split`, `norm`), is an
# error in PyTorch 2.11 and breaks the graph in later ones.
for _name, _plain in vars(torch.Tensor).items():
    if isinstance(_plain, types.FunctionType) and not _name.startswith("_") and _name not in vars(ShardedParameter):
        setattr(ShardedParameter, _name, _method(_plain))


@torch.compiler.disable  # what runs eagerly between two graphs reads parameters through here: nothing to capture
def _eager(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    parameters = [p for p in _flat(args, kwargs) if isinstance(p, ShardedParameter)]
    unit = next((p._zinf_unit for p in parameters if not p._zinf_unit.at_hand), parameters[0]._zinf_unit)
    conversion = name in ("to", "cpu", "cuda", "float", "half", "double", "bfloat16") and args[0] is parameters[0]
    if conversion and _converts_nothing(parameters[0]._zinf_unit, name, args, kwargs):
        return args[0]
    if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
        return func(*tree_map(_gradient_edge, tuple(args)), **tree_map(_gradient_edge, kwargs))
    if func is torch.Tensor.detach and packs_for_recomputation():
        with no_torch_function():
            return func(*args, **kwargs)  # torch.utils.checkpoint keeps it for the backward, which gathers it
    limited = limited_frame()
    if limited is not None and unit.at_hand:
        warn_of_eager_frame(limited, unit.name)
    elif limited is not None:
        raise PartitionedParameterError(
            f"parameter {unit.name} is partitioned, but {limited} now runs eagerly: Dynamo compiled it "
            f"torch._dynamo.config.recompile_limit = {torch._dynamo.config.recompile_limit} times and then gave up. Raise "
            "torch._dynamo.config.recompile_limit, or find what changes from call to call with TORCH_LOGS=recompiles"
        )
    try:
        answer = on_shards(func, name, args, kwargs, parameters)
    except PartitionedParameterError:
        _reject_optimizer(unit, call_name(func))
        raise
    if answer is not NotImplemented:
        return answer
    if name == "__set__" and args[0] is parameters[0]:
        _assign_data(parameters[0], args[1])
        return None
    if name == "_has_compatible_shallow_copy_type":  # Module.to() asks: may args[0].data become args[1]?
        if args[1] is not args[0]:
            _check_assignable(parameters[0], args[1])
        return True
    if func in _ON_OFFLOADED and _are_offloaded(func, parameters):
        return _on_whole(func, name, parameters, args, kwargs)
    if not unit.at_hand:
        _reject_optimizer(unit, call_name(func))
    if not unit.at_hand:
        raise PartitionedParameterError(
            f"{call_name(func)} reads parameter {unit.name}, shape {list(unit.shape)}, outside a compiled graph, but "
            f"{_place(unit)}, use `with zinf_compile.gathered(model):` to read it (write=True to change it), "
            "zinf_compile.full_state_dict(model) to save and load_full_state_dict to load; wrapping the model in DDP or FSDP is "
            "neither possible nor needed (where accelerate or transformers' Trainer does: zinf_compile.hf.adopt)"
        )
    return _on_whole(func, name, parameters, args, kwargs)


def _place(unit: Unit) -> str:
    context = unit.context
    if context.size == 1 and unit.home is not None:
        return f"its value is kept off the device (option params={unit.home.tier!r}). There"
    return f"its value is spread over {context.size} ranks (this is rank {context.rank}). On all ranks"


def _reject_optimizer(unit: Unit, name: str) -> None:
    """Raise where an optimizer's method works on parameters not all of which are at hand: it must change all or none."""
    calling = ((caller, method) for caller, method in calling_methods() if isinstance(caller, torch.optim.Optimizer))
    optimizer, method = next(calling, (None, ""))
    if optimizer is None:
        return
    units = [unit, *(u for group in optimizer.param_groups for p in group["params"] if (u := unit_of(p)) is not None)]
    away = next((u for u in units if not u.at_hand and type(u.parameter()) is ShardedParameter), None)
    if away is not None:
        raise PartitionedParameterError(
            f"{type(optimizer).__name__}.{method}() calls {name} of parameter {away.name}, shape {list(away.shape)}, but "
            f"{_place(away).partition('.')[0]}. {_way_for_optimizer(away)}"
        )


def _way_for_optimizer(unit: Unit) -> str:
    if unit.context.size == 1:
        return "Call it inside `with zinf_compile.gathered(model, write=True):`"
    return (
        "Here an optimizer is given its shards in step() alone, after its closure. Load zinf_compile.full_state_dict(model) and "
        "zinf_compile.full_optimizer_state_dict(optimizer) into the plain model and an optimizer of it, and call it there"
    )


def _on_whole(
    func: Callable[..., Any], name: str, parameters: list[ShardedParameter], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run `func` on the values, which a single rank has; autograd reaches the parameters through `_Whole`."""
    differentiate = torch.is_grad_enabled() and func not in _DETACHED
    if args and isinstance(args[0], ShardedParameter):
        reject_reshape(func, args[0]._zinf_unit)
    changed = [p for p in changed_parameters(name, args, kwargs) if isinstance(p, ShardedParameter)]
    values: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        with no_torch_function():
            needs_grad = parameter.requires_grad and differentiate
        if needs_grad and any(p is parameter for p in changed):
            values[id(parameter)] = parameter._zinf_unit.whole().detach().requires_grad_()  # PyTorch refuses it as any leaf
        else:
            values[id(parameter)] = _Whole.apply(parameter) if needs_grad else _value(parameter._zinf_unit)

    def value_of(item: Any) -> Any:
        return values[id(item)] if isinstance(item, ShardedParameter) else item

    result = func(*tree_map(value_of, tuple(args)), **tree_map(value_of, kwargs))
    for parameter in changed:
        torch.autograd.graph.increment_version(parameter)
    for parameter in parameters:
        if result is values[id(parameter)]:
            return parameter
    return result


def _are_offloaded(func: Callable[..., Any], parameters: Sequence[ShardedParameter]) -> bool:
    """Say whether the only rank has the parameters, one of them off the device, and there is nothing to differentiate."""
    with no_torch_function():
        differentiated = func not in _DETACHED and torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
    units = [p._zinf_unit for p in parameters]
    return units[0].context.size == 1 and not all(u.at_hand for u in units) and not differentiated


def _value(unit: Unit) -> torch.Tensor:
    return unit.whole().detach() if unit.at_hand else offloaded_value(unit)


class _Whole(torch.autograd.Function):
    """The value of a parameter on a single rank, differentiable."""

    @staticmethod
    def forward(ctx: Any, parameter: ShardedParameter) -> torch.Tensor:
        ctx.unit = parameter._zinf_unit
        return ctx.unit.whole().detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        unit: Unit = ctx.unit
        shard = unit.flat(grad).to(unit.reduce_dtype, copy=True)
        unit.context.ledger.track("grads", shard)
        return ShardedGradient(unit, *take_away(unit, shard, Done()))


def _gradient_edge(item: Any) -> Any:
    """Name the parameter to autograd without its value, and without switching off the overrides that hooks rely on."""
    if not isinstance(item, ShardedParameter):
        return item
    with no_torch_function():
        return torch.autograd.graph.get_gradient_edge(item)


def _assign_data(parameter: ShardedParameter, value: torch.Tensor) -> None:
    if value is not parameter:
        _check_assignable(parameter, value)
        assign(parameter._zinf_unit, value._zinf_unit.whole() if isinstance(value, ShardedParameter) else value)


def _check_assignable(parameter: ShardedParameter, value: torch.Tensor) -> None:
    unit = parameter._zinf_unit
    same = tuple(value.shape) == unit.shape and value.dtype == unit.dtype and value.device == unit.device
    if not same or not unit.at_hand:
        raise PartitionedParameterError(
            f"parameter {unit.name} is partitioned as {list(unit.shape)} {unit.dtype} on {unit.device}; assigning its data "
            f"({list(value.shape)} {value.dtype} on {value.device}) is not possible. Convert or move the model before its first "
            "compiled call (or use autocast), and change values inside `with zinf_compile.gathered(model, write=True):`"
        )


def _converts_nothing(unit: Unit, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("copy"):
        return False
    if name == "cpu":
        return unit.device.type == "cpu"
    if name == "cuda":
        return unit.device.type == "cuda" and torch.empty(0, device=unit.device).cuda(*args[1:], **kwargs).device == unit.device
    if name in _CONVERSIONS:
        return unit.dtype == _CONVERSIONS[name]
    probe = torch.empty(0, dtype=unit.dtype, device=unit.device)
    try:
        return probe.to(*map(_without_number, args[1:]), **{k: _without_number(v) for k, v in kwargs.items()}) is probe
    except RuntimeError:
        return False  # let the real call complain


def _without_number(value: Any) -> Any:
    """Return a device as it is; the CPU, of which there is one, without the number that accelerate gives it on each rank."""
    if not isinstance(value, str | torch.device) or torch.device(value).type != "cpu":
        return value
    return torch.device("cpu")


def _flat(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return tree_leaves((args, kwargs))
