"""Full values of partitioned models: read or change them in place, save them, load them, one parameter at a time."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zinf_compile._torch import no_torch_function
from zinf_compile.errors import PartitionedParameterError, UnsupportedModelError
from zinf_compile.ir.program import digest_of
from zinf_compile.runtime.comm.steps_done import mixed
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.steps_taken import describe_steps, digest_of_steps, forget_steps
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.runtime.units.whole import gather_on_first, gather_whole, scatter_whole
from zinf_compile.sharded.arguments import plain
from zinf_compile.sharded.held_values import in_use
from zinf_compile.sharded.parameter import ShardedParameter, fill, hollow_out, unit_of
from zinf_compile.sharded.tensor import ShardedTensor


@contextlib.contextmanager
def gathered(model: nn.Module, *, write: bool = False) -> Iterator[nn.Module]:
    """Make every partitioned parameter of `model` whole on every rank inside the `with` block.

    A collective operation: all ranks enter and leave. With `write=True`, changes made inside are kept: rank 0's values, spread
    over the ranks again; without it, or when the block raises, they are dropped. The compiled model can't be called inside.
    Needs memory for the whole model on each rank; to save or load, `full_state_dict` and `load_full_state_dict` need that
    of one parameter. A change of type or shape raises `PartitionedParameterError` and leaves the old values.
    """
    plain(model)  # nothing else than a model is accepted
    if write:
        _reject_nesting(model)
    found = partitioned_parameters(model)
    first = agree_on_units(found, "entering gathered()", f"write={write}")
    with torch.inference_mode(False):
        for parameter in found.values():
            unit = parameter._zinf_unit
            fill(parameter, unit.logical(_full(unit)))
    try:
        yield model
    except BaseException:
        _repartition(found, write=False)  # not collective: other ranks may not have failed
        raise
    converted = _converted(found) if write else ""
    if write and first is not None:
        keep = first.ranks.agree(["leaving gathered(write=True)"], what="leaving gathered()", value=bool(converted))[0] == 0.0
        _repartition(found, write=keep)
        if not keep:
            raise PartitionedParameterError(
                "a partitioned parameter keeps its shape, type and device; nothing was changed. Inside gathered(write=True) "
                f"{converted or 'one was converted on rank 0'}: convert the model before its first compiled call"
            )
    else:
        _repartition(found, write=False)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return eager's `state_dict()`, on the host of rank 0, with one parameter whole at a time; other ranks get an empty one.

    A collective operation. Keys, shapes and types are those of the model before it was compiled, so that a plain model loads it.
    """
    model = plain(model)
    found = partitioned_parameters(model)
    unit = agree_on_units(found, "saving the model", "")
    keep = unit is None or unit.shard_group.rank == 0
    failed = PartitionedParameterError("state_dict() of the model failed on rank 0, see there; nothing was saved")
    with contextlib.nullcontext() if unit is None else unit.ranks.fail_together("saving the model", elsewhere=failed):
        reject_hollow(state_names(model))
        skeleton: dict[str, Any] = model.state_dict(keep_vars=True) if keep else {}  # contains the parameters themselves
    state: dict[str, Any] = dict.fromkeys(skeleton)
    names = state_names(model)
    copies: dict[int, torch.Tensor] = {}
    for parameter in found.values():
        full = on_first_rank(parameter._zinf_unit)
        if full is not None:
            copies[id(parameter)] = full.to("cpu")
        del full
    for tensor in {id(each): each for each in names.values() if type(each) is ShardedTensor}.values():
        full = tensor.full_tensor()
        if keep:
            copies[id(tensor)] = full.to("cpu")
        del full
    for name, value in skeleton.items():
        owner = names.get(name)
        if id(owner) in copies:
            state[name] = copies[id(owner)]
        else:
            state[name] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any] | None) -> None:
    """Load what `full_state_dict` returned, or a plain `state_dict`; only rank 0's `state` is read.

    A collective operation. All keys and shapes are checked before anything changes; every mismatch is named, on all ranks. Of a
    tied tensor one of its names is enough, as safetensors files have it.
    """
    model = plain(model)
    found = partitioned_parameters(model)
    unit = agree_on_units(found, "loading the model", "", compare_steps=False)
    first = unit is None or unit.shard_group.rank == 0
    targets = state_names(model)
    if unit is None and targets and not state:
        raise UnsupportedModelError(f"the state doesn't fit the model; nothing was changed. {NOT_GIVEN}")
    if first and isinstance(state, Mapping) and (tied := tied_names(targets, state.keys())):
        state = collections.ChainMap({name: state[other] for name, other in tied.items()}, state)  # type: ignore[arg-type]  # read only
    problems = _mismatches(targets, state) if first else []
    _share_problems(unit, problems)
    done: set[int] = set()
    for name, target in targets.items():
        if id(target) in done:
            continue
        done.add(id(target))
        value = state[name] if first and state is not None else None
        if isinstance(target, ShardedParameter):
            _store(target, value)
        elif unit is None or unit.shard_group.size == 1:
            with torch.no_grad():
                target.copy_(value)  # type: ignore[arg-type]
        else:
            broadcast_into(target, value, unit.context, "loading the model")
    forget_steps(parameter._zinf_unit for parameter in found.values())
    if unit is not None:
        unit.context.eager_changes = 0  # changes on single ranks are overwritten


NOT_GIVEN = (
    "none was given, or an empty one, and nothing is partitioned: then each rank needs one. Where the model is spread over "
    "several ranks, call it once on all of them, under torch.no_grad(), and rank 0's is enough"
)


def reject_hollow(names: Mapping[str, torch.Tensor]) -> None:
    """Raise `UnsupportedModelError` for parameters and buffers on the meta device, which have no values to be saved."""
    hollow = [name for name, tensor in names.items() if tensor.is_meta]
    if hollow:
        more = f" and {len(hollow) - 1} more" if len(hollow) > 1 else ""
        raise UnsupportedModelError(
            f"{hollow[0]}{more} on the meta device: there are no values to save, and nothing was written. "
            "zinf_compile.partition(model, ...) and zinf_compile.load(folder, model) give them some"
        )


def partitioned_parameters(model: nn.Module) -> dict[str, ShardedParameter]:
    """Return the partitioned parameters by name, tied ones once."""
    return {name: p for name, p in model.named_parameters() if isinstance(p, ShardedParameter)}


def agree_on_units(found: Mapping[str, ShardedParameter], what: str, detail: str, *, compare_steps: bool = True) -> Unit | None:
    """Check that all ranks do the same with the same model after the same steps; return the model's first unit.

    Returns None if nothing is partitioned. `compare_steps=False`: for operations that overwrite all values.
    """
    if not found:
        return None
    for name, parameter in found.items():
        parameter._zinf_unit.name = name
    units = [p._zinf_unit for p in found.values()] if compare_steps else []
    lines = [f"{what} {detail}".rstrip(), *(f"{name} is unit {p._zinf_unit.serial}" for name, p in found.items())]
    first = next(iter(found.values()))._zinf_unit
    first.ranks.agree(
        lines,
        what=what,
        digest=mixed(digest_of(lines), digest_of_steps(units)),
        details=lambda: describe_steps(units),
    )
    return first


def _full(unit: Unit) -> torch.Tensor:
    """Return the full value of one unit, gathered on every rank into a new buffer."""
    context = unit.context
    full = context.full_buffer(unit.numel, unit.dtype, unit.device)
    with torch.no_grad():
        gather_whole(unit, unit.load(), full, f"gathering {unit.name}")
    return full


def _reject_nesting(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if unit_of(parameter) is not None and not isinstance(parameter, ShardedParameter):
            raise PartitionedParameterError(
                f"gathered(write=True) inside a gathered() that holds {name} whole already: give write=True to the outer one"
            )


def _converted(found: Mapping[str, ShardedParameter]) -> str:
    """Describe the first parameter whose shape, type or device differs from its unit's; empty if none does."""
    for name, parameter in found.items():
        unit = parameter._zinf_unit
        if (tuple(parameter.shape), parameter.dtype, parameter.device) != (unit.shape, unit.dtype, unit.device):
            return f"{name} became {list(parameter.shape)} {parameter.dtype} on {parameter.device}"
    return ""


def on_first_rank(unit: Unit) -> torch.Tensor | None:
    """Return the full value of one unit on rank 0, None on the others."""
    return gathered_on_first(unit, unit.load(), f"gathering {unit.name} on rank 0")


def gathered_on_first(unit: Unit, shard: torch.Tensor, what: str) -> torch.Tensor | None:
    """Gather a value sharded like a unit, of any data type, on rank 0; return it there, None on the others."""
    context = unit.context
    full = context.full_buffer(unit.numel, shard.dtype, unit.device) if unit.shard_group.rank == 0 else None
    with torch.no_grad():
        gather_on_first(unit, shard, full, what)
    return unit.logical(full) if full is not None else None


def _repartition(found: Mapping[str, ShardedParameter], *, write: bool) -> None:
    for parameter in found.values():
        unit = parameter._zinf_unit
        with torch.inference_mode(False), torch.no_grad(), no_torch_function():
            if write:
                _scatter(unit, parameter.detach() if unit.shard_group.rank == 0 else None)
            grad, parameter.grad = parameter.grad, None
            keep = not write and not _converted({unit.name: parameter}) and in_use([parameter], called=False)
            hollow_out(parameter, unit, held=parameter.detach() if keep else None)
            parameter.grad = None if grad is None else grad.to(unit.dtype)
            if write:
                torch.autograd.graph.increment_version(parameter)


def _store(parameter: ShardedParameter, value: torch.Tensor | None) -> None:
    unit = parameter._zinf_unit
    full = None
    if value is not None:
        full = value.detach().to(device=unit.device, dtype=unit.dtype).expand(unit.shape)
    with torch.no_grad():
        _scatter(unit, full)
    torch.autograd.graph.increment_version(parameter)


def _scatter(unit: Unit, full: torch.Tensor | None) -> None:
    flat = unit.flat(full) if full is not None else None
    shard = unit.blank()
    scatter_whole(unit, flat, shard, f"partitioning {unit.name}")
    unit.save(shard)


def broadcast_into(target: torch.Tensor, value: torch.Tensor | None, context: Context, what: str) -> None:
    """Broadcast rank 0's value of a tensor that is not partitioned."""
    with torch.no_grad():
        if value is not None:
            target.copy_(value)
        context.finish(context.lanes.gather.submit(lambda: context.gathers.broadcast(target)), what)


def state_names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer by its name in the state dict; tied ones under each of their names."""
    names: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names[f"{prefix}.{name}" if prefix else name] = buffer
    return names


def first_names(tensors: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Return the first name of each tensor, by its id."""
    return {id(tensor): name for name, tensor in reversed(list(tensors.items()))}


def tied_names(targets: Mapping[str, torch.Tensor], stored: Collection[str]) -> dict[str, str]:
    """Return the names of a model's tensors that are not stored, each with another name of the same tied tensor that is."""
    found = first_names({name: target for name, target in targets.items() if name in stored})
    return {name: found[id(target)] for name, target in targets.items() if name not in stored and id(target) in found}


def _mismatches(targets: Mapping[str, torch.Tensor], state: Mapping[str, Any] | None) -> list[str]:
    if state is None:
        return ["rank 0 was given no state"]
    if not isinstance(state, Mapping):
        return [f"rank 0 was given a {type(state).__name__}; accepted: a mapping of names to tensors"]
    problems = [f"missing: {name}" for name in targets if name not in state]
    problems += [f"unexpected: {name}" for name in state if name not in targets and isinstance(state[name], torch.Tensor)]
    for name, target in targets.items():
        value = state.get(name)
        if name in state and not isinstance(value, torch.Tensor):
            problems.append(f"{name} is a {type(value).__name__} in the state, not a tensor")
        elif isinstance(value, torch.Tensor) and value.shape != target.shape:
            problems.append(f"shape of {name}: {list(value.shape)} in the state, {list(target.shape)} in the model")
    return problems


def _share_problems(unit: Unit | None, problems: list[str]) -> None:
    count = len(problems)
    if unit is not None:
        count = int(unit.ranks.agree(["loading the model: checking the state"], what="loading the model", value=count)[0])
    if count:
        listed = "; ".join(problems) if problems else f"{count} mismatches, named on rank 0"
        raise UnsupportedModelError(f"the state doesn't fit the model; nothing was changed. {listed}")
