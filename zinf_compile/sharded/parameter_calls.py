"""Eager calls on partitioned parameters: on shards, on whole values where this process has them, or refused with the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from zinf_compile._frames import calling_methods, inside_compiled_call, inside_new_parameter
from zinf_compile._torch import inside_ddp, limited_frame, no_torch_function, packs_for_recomputation, tree_leaves, tree_map
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.memory.own_storage import with_own_storage
from zinf_compile.runtime.system.accelerator import converting_methods
from zinf_compile.runtime.units.fetch import fetch
from zinf_compile.runtime.units.unit import Unit

from .call_names import call_name
from .data_assignment import changed_parameters, reject_reshape
from .eager_collectives import gather_for_eager
from .eager_gradients import partitioned_gradient
from .gathered_copies import lost_write, read_only, unrecorded_copy, versions
from .hollow_calls import answer_assignment, call_on_values
from .metadata_calls import converts_nothing
from .offloaded_value import value_of as offloaded_value
from .operands import has_whole_values
from .parameter import ShardedParameter, assign_data, check_assignable, unit_of
from .parameter_ops import DETACHED, on_shards
from .recompile_limit import warn_of_eager_frame
from .tensor import ShardedTensor
from .wrapping_optimizers import is_wrapper

_ON_OFFLOADED = (*DETACHED, torch.Tensor.copy_)
"""Calls that load the value of a parameter off the device when it is read, on one process: `state_dict` and loading."""


@torch.compiler.disable  # what runs eagerly between two graphs reads parameters through here: nothing to capture
def answer_for_parameter(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Perform an eager call of which an argument is a partitioned parameter, on shards or on whole values."""
    name = getattr(func, "__name__", str(func))
    if getattr(func, "__module__", None) == "torch.nn.init" and "tensor" in kwargs:  # by name, and without a gradient
        with torch.no_grad():
            return answer_for_parameter(func, (kwargs["tensor"],), {key: kwargs[key] for key in kwargs if key != "tensor"})
    parameters = [p for p in tree_leaves((args, kwargs)) if isinstance(p, ShardedParameter)]
    unit = next((p._zinf_unit for p in parameters if not p._zinf_unit.at_hand), parameters[0]._zinf_unit)
    conversion = name in converting_methods() and args[0] is parameters[0]
    if conversion and converts_nothing(parameters[0]._zinf_unit, name, args, kwargs):
        return args[0]
    if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
        return func(*tree_map(_gradient_edge, tuple(args)), **tree_map(_gradient_edge, kwargs))
    if func is torch.Tensor.detach and packs_for_recomputation():
        with no_torch_function():
            return func(*args, **kwargs)  # torch.utils.checkpoint keeps it for the backward, which gathers it
    if func is torch.Tensor.detach and inside_new_parameter():  # which wants another one of the same class
        raise PartitionedParameterError(
            f"nn.Parameter() reads parameter {unit.name}, shape {list(unit.shape)}, which is partitioned. Give it a value, "
            "as `parameter.detach().clone()` is where the parameter is on the device of one process; else, and to register a "
            "parametrization, call it inside `with zinf_compile.gathered(model, write=True):`"
        )
    limited = limited_frame()
    if limited is not None and unit.at_hand:
        warn_of_eager_frame(limited, unit.name)
    elif limited is not None:
        raise PartitionedParameterError(
            f"parameter {unit.name} is partitioned, but {limited} now runs eagerly: Dynamo compiled it "
            f"torch._dynamo.config.recompile_limit = {torch._dynamo.config.recompile_limit} times and then gave up. Raise "
            "torch._dynamo.config.recompile_limit, or find what changes from call to call with TORCH_LOGS=recompiles"
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # a trace would hold the way to the values, not them
        raise PartitionedParameterError(
            f"torch.jit.trace reads parameter {unit.name}, shape {list(unit.shape)}, which is partitioned: trace a plain copy of "
            "the model that has loaded zinf_compile.full_state_dict(model)"
        )
    try:
        answer = on_shards(func, name, args, kwargs, parameters)
    except PartitionedParameterError:
        _reject_optimizer(unit, call_name(func))
        raise
    if answer is not NotImplemented:
        return answer
    first = parameters[0]
    assignment = answer_assignment(name, args, first, assign=partial(assign_data, first), check=partial(check_assignable, first))
    if assignment is not NotImplemented:
        return assignment
    if func in _ON_OFFLOADED and _are_offloaded(func, parameters):
        return _on_whole(func, name, parameters, args, kwargs)
    if not unit.at_hand:
        _reject_optimizer(unit, call_name(func))
    writes = any(isinstance(target, ShardedParameter | ShardedTensor) for target in changed_parameters(name, args, kwargs))
    if not unit.at_hand and (writes or not _may_gather(parameters)):
        raise PartitionedParameterError(
            f"{call_name(func)} reads parameter {unit.name}, shape {list(unit.shape)}, outside a compiled graph"
            f"{_called_uncompiled()}, but {_place(unit)}, use `with zinf_compile.gathered(model):` to read it (write=True to "
            "change it), zinf_compile.full_state_dict(model) to save and load_full_state_dict to load (for dcp.save and dcp.load "
            "zinf_compile.dcp_state_dict(model, optimizer) in the place of get_state_dict); wrapping the model in DDP or FSDP is "
            "neither possible nor needed (where accelerate or transformers' Trainer does: zinf_compile.hf.adopt)"
        )
    return _on_whole(func, name, parameters, args, kwargs)


def _called_uncompiled() -> str:
    """Name the outermost module that is called, not through what is compiled, and say what to call; empty where none is."""
    if inside_compiled_call() or inside_ddp():
        return ""
    called = [caller for caller, method in calling_methods() if isinstance(caller, nn.Module) and method == "_call_impl"]
    if not called:
        return ""
    return f" ({type(called[-1]).__name__} is called uncompiled: call what torch.compile() returned, or call its compile() first)"


def _place(unit: Unit) -> str:
    group = unit.shard_group
    if group.size == 1 and unit.backing is not None:
        return f"its value is kept off the device (option params={unit.backing.tier!r}). There"
    return f"its value is spread over {group.size} ranks (this is rank {group.rank}). On all ranks"


def _reject_optimizer(unit: Unit, name: str) -> None:
    """Raise where an optimizer's method works on parameters not all of which are at hand: it must change all or none."""
    calling = ((caller, method) for caller, method in calling_methods() if isinstance(caller, torch.optim.Optimizer))
    optimizer, method = next(calling, (None, ""))
    if optimizer is None or is_wrapper(optimizer):
        return
    units = [unit, *(u for group in optimizer.param_groups for p in group["params"] if (u := unit_of(p)) is not None)]
    refused = next((u for u in units if not u.at_hand and type(u.parameter()) is ShardedParameter), None)
    if refused is not None:
        raise PartitionedParameterError(
            f"{type(optimizer).__name__}.{method}() calls {name} of parameter {refused.name}, shape {list(refused.shape)}, but "
            f"{_place(refused).partition('.')[0]}. {_way_for_optimizer(refused)}"
        )


def _way_for_optimizer(unit: Unit) -> str:
    if unit.shard_group.size == 1:
        return "Call it inside `with zinf_compile.gathered(model, write=True):`"
    return (
        "Here an optimizer is given its shards in step() alone, after its closure. Load zinf_compile.full_state_dict(model) and "
        "zinf_compile.full_optimizer_state_dict(optimizer) into the plain model and an optimizer of it, and call it there"
    )


def _on_whole(
    func: Callable[..., Any], name: str, parameters: list[ShardedParameter], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run `func` on whole values; autograd reaches the parameters through `_Whole`."""
    differentiate = torch.is_grad_enabled() and func not in DETACHED
    if args and isinstance(args[0], ShardedParameter):
        reject_reshape(func, args[0]._zinf_unit)
    changed = [p for p in changed_parameters(name, args, kwargs) if isinstance(p, ShardedParameter)]
    values: dict[ShardedParameter, torch.Tensor] = {}
    for parameter in changed:
        if func is torch.Tensor.copy_:  # all of it: a step that failed to update it need not be told
            parameter._zinf_unit.begin_replacing()
        parameter._zinf_unit.changing()
    for parameter in parameters:
        with no_torch_function():
            needs_grad = parameter.requires_grad and differentiate
        if needs_grad and any(p is parameter for p in changed):
            values[parameter] = parameter._zinf_unit.whole().detach().requires_grad_()  # PyTorch refuses it as any leaf
        else:
            values[parameter] = _whole(parameter) if needs_grad else _value(parameter._zinf_unit, recorded=differentiate)
    copies = {p: v for p, v in values.items() if not p._zinf_unit.at_hand and type(v) is torch.Tensor}
    before = versions(list(copies.values()))
    result = call_on_values(func, args, kwargs, list(values.items()))
    for (parameter, copy), version in zip(copies.items(), before, strict=True):
        if parameter._zinf_unit.shard_group.size > 1:
            if lost := lost_write(copy, version, result):
                _refuse_change(func, parameter._zinf_unit, lost)
        elif copy._version != version:  # as an embedding with `max_norm` does
            with torch.no_grad():
                offloaded_value(parameter._zinf_unit).copy_(copy)
            torch.autograd.graph.increment_version(parameter)
    result = read_only(result, list(copies.values()))
    for parameter in changed:
        torch.autograd.graph.increment_version(parameter)
    values.clear()
    for parameter in parameters:
        if parameter._zinf_unit.saving is not None and parameter._zinf_unit.aliased:
            parameter._zinf_unit.changing()  # the result is memory of it
    return result


def _are_offloaded(func: Callable[..., Any], parameters: Sequence[ShardedParameter]) -> bool:
    """Return whether the only rank has the parameters, one of them off the device, and there is nothing to differentiate."""
    with no_torch_function():
        differentiated = func not in DETACHED and torch.is_grad_enabled() and any(p.requires_grad for p in parameters)
    units = [p._zinf_unit for p in parameters]
    alone = all(u.shard_group.size == 1 for u in units)
    return alone and not all(u.at_hand for u in units) and not differentiated


def _may_gather(parameters: Sequence[ShardedParameter]) -> bool:
    """Say whether whole values may be made of parameters that aren't at hand."""
    return not inside_ddp() and all(has_whole_values(p._zinf_unit) for p in parameters)  # DDP is what the package replaces


def _refuse_change(func: Callable[..., Any], unit: Unit, because: str) -> NoReturn:
    raise PartitionedParameterError(
        f"{call_name(func)} was given a copy of parameter {unit.name}, shape {list(unit.shape)}, for {_place(unit)}, use `with "
        f"zinf_compile.gathered(model, write=True):` to change it. Here {because}"
    )


def _value(unit: Unit, *, recorded: bool) -> torch.Tensor:
    """Return a unit's value: its memory, a tensor that loads it when it is read, or a copy, on several ranks gathered.

    `recorded`: autograd may keep it for a backward, by which a step may have changed what is elsewhere: a copy, then.
    """
    if unit.at_hand:
        return unit.whole().detach()
    if unit.shard_group.size > 1:
        return gather_for_eager(unit) if recorded else unrecorded_copy(partial(gather_for_eager, unit))
    if not recorded:
        return offloaded_value(unit)
    with torch.inference_mode(False), torch.no_grad():
        value = fetch(unit)
        if value is unit.resident:
            value = value.clone()
            unit.context.memory.ledger.track("staging", value)
        return with_own_storage(unit.logical(value))  # no view for autograd: a call may write to it


def _whole(parameter: ShardedParameter) -> torch.Tensor:
    with no_torch_function():  # a transform would ask the parameter what it makes of the call
        whole: torch.Tensor = _Whole.apply(parameter, parameter._zinf_unit)
    return whole


class _Whole(torch.autograd.Function):
    """The value of a parameter, differentiable. Transforms of `torch.func` see a constant: no level of theirs has wrapped it."""

    @staticmethod
    def forward(parameter: ShardedParameter, unit: Unit) -> torch.Tensor:
        return _value(unit, recorded=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[ShardedParameter, Unit], output: torch.Tensor) -> None:
        ctx.unit = inputs[1]

    @staticmethod
    def vmap(info: Any, in_dims: Any, parameter: ShardedParameter, unit: Unit) -> tuple[torch.Tensor, None]:
        return _Whole.apply(parameter, unit), None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return partitioned_gradient(ctx.unit, grad), None


def _gradient_edge(item: Any) -> Any:
    """Name the parameter to autograd without its value, and without switching off the overrides that hooks rely on."""
    if not isinstance(item, ShardedParameter):
        return item
    with no_torch_function():
        return torch.autograd.graph.get_gradient_edge(item)
