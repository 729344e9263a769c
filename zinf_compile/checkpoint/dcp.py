"""States for `dcp.save` and `dcp.load` in the user's own loop: read and written part by part, never whole in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.errors import CheckpointError
from zinf_compile.optim.chunks import MASTER
from zinf_compile.optim.state_pieces import Key
from zinf_compile.optim.state_ranges import StateRange, begin_loading, end_loading, states_to_load
from zinf_compile.optim.step_hooks import install
from zinf_compile.runtime.units.shard_values import BackedShard, DeviceShard, pieces_of
from zinf_compile.runtime.units.steps_taken import forget_steps
from zinf_compile.runtime.units.unit import Unit
from zinf_compile.sharded.arguments import plain
from zinf_compile.sharded.parameter import ShardedParameter

from .dcp_tensor import DcpTensor, ShardRange
from .fit import named_optimizers
from .gathered import first_names, partitioned_parameters, state_names
from .plain_values import decode, encode
from .rectangles import Rectangle
from .shard_parts import ShardPart, shard_parts, stretches_of

_PART_NUMEL = 1 << 22
"""The most elements of a part, which are in memory while it is saved or loaded."""

_MIDDLE = (
    "dcp.load ended in its middle: parameters and states are replaced in part. Load a checkpoint of model and optimizer again"
)


def dcp_state_dict(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] = ()) -> dict[str, Any]:
    """Return what `torch.distributed.checkpoint` saves and loads of a model and its optimizers, on any ranks, tiers and tiles.

        dcp.save({**zinf_compile.dcp_state_dict(model, optimizer), "step": step}, checkpoint_id=folder)
        dcp.load(zinf_compile.dcp_state_dict(model, optimizer), checkpoint_id=folder)

    Values have PyTorch's names (`model.NAME`, `optimizer.state.NAME.STATE`). Each part is read from where it lives when it is
    written, and written there when it is read, so that a few MiB are in memory. Until `dcp.load` has returned, what it has begun
    to change is refused by `StepFailedError`.
    """
    model = plain(model)
    return {"model": _Model(model), **{prefix: _Optimizer(model, each) for prefix, each in named_optimizers(optimizer)}}


class _Model:
    """`torch.distributed.checkpoint.stateful.Stateful` of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors by name; tied ones under each of theirs. What is whole on each rank, as buffers, is rank 0's."""
        names, made = state_names(self._model), dict[int, torch.Tensor]()
        unit = next((tensor._zinf_unit for tensor in names.values() if isinstance(tensor, ShardedParameter)), None)
        for tensor in names.values():
            if id(tensor) in made:
                continue
            if isinstance(tensor, ShardedParameter):
                made[id(tensor)] = _parameter(tensor)
            elif unit is None or unit.shard_group.size == 1:
                made[id(tensor)] = tensor.detach()
            else:
                made[id(tensor)] = _whole(tensor, unit, lambda: None)
        return {name: made[id(tensor)] for name, tensor in names.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """End a load: all values were replaced."""
        found = partitioned_parameters(self._model).values()
        for parameter in found:
            parameter._zinf_unit.restored()
            torch.autograd.graph.increment_version(parameter)
            parameter._zinf_unit.context.eager_changes = 0
        forget_steps(parameter._zinf_unit for parameter in found)


class _Optimizer:
    """`torch.distributed.checkpoint.stateful.Stateful` of an optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._names = first_names(state_names(model))
        self._large: dict[Key, torch.dtype] = {}
        """States that are partitioned."""
        self._whole: dict[Key, torch.Tensor] = {}
        """All others that are tensors."""
        self._all_made = True
        """Each parameter has its states; where one has none yet, zeros are saved, and a load makes them."""
        self._loading = False

    def state_dict(self) -> dict[str, Any]:
        """Return states by the names of parameters, groups as PyTorch's `get_optimizer_state_dict` has them, and settings."""
        self._large, self._whole, self._all_made, self._loading = {}, {}, True, False
        optimizer, states = self._optimizer, dict[str, dict[str, Any]]()
        small: dict[str, Any] = {}
        first: Unit | None = None
        for parameter, own in states_to_load(optimizer).items():
            name, known = self._name(parameter), parameter in optimizer.state
            self._all_made = self._all_made and known
            tensors = {state: value for state, value in own.small.items() if isinstance(value, torch.Tensor)}
            states[name] = {state: self._small(value, own.unit) for state, value in tensors.items()}
            self._whole.update({(parameter, state): value for state, value in tensors.items()})
            if known:
                small[name] = dict(own.small)
            first = first or own.unit
            for state, dtype in own.large.items():
                if own.unit is not None:
                    self._large[parameter, state] = dtype
                    values = StateRange(optimizer, parameter, state, own.unit, dtype)
                    states[name][state] = _tensor(parameter, own.unit, dtype, values, self._begin)
                else:
                    whole = optimizer.state[parameter][state] if known else torch.zeros_like(parameter, dtype=dtype)
                    states[name][state] = self._whole[parameter, state] = whole
        params = [[self._name(p) for p in group["params"]] for group in optimizer.param_groups]
        groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        tensors = {}
        settings = {
            "class": type(optimizer).__name__,
            "params": params,
            "groups": encode(groups, "groups", tensors),
            "small": encode(small, "small", tensors),
            "masters": sorted({self._name(parameter) for parameter, state in self._large if state == MASTER}),
            "tensors": {key: [str(t.dtype)[6:], list(t.shape), t.reshape(-1).tolist()] for key, t in tensors.items()},
        }
        listed = [{**group, "params": names} for group, names in zip(groups, params, strict=True)]
        text = json.dumps(settings)
        if first is not None:  # of a parameter without dimensions, rank 0 has the states
            text = first.ranks.share(text, what="an optimizer's state for torch.distributed.checkpoint")
        return {"state": states, "param_groups": listed, "settings": text}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """End a load. Raises `CheckpointError` where the states are those of another optimizer, which is then refused."""
        self._begin()
        settings = json.loads(state_dict["settings"])
        mine = [[self._name(p) for p in group["params"]] for group in self._optimizer.param_groups]
        own = type(self._optimizer).__name__
        if settings["class"] != own or settings["params"] != mine:
            raise CheckpointError(
                f"the states are those of a {settings['class']} with {sum(map(len, settings['params']))} parameters, given is a "
                f"{own} with {sum(map(len, mine))}: load into the optimizer that was saved, or one made like it"
            )
        named = {self._name(p): p for group in self._optimizer.param_groups for p in group["params"]}
        if whole := [n for n in settings.get("masters", []) if not isinstance(named[n], ShardedParameter)]:
            raise CheckpointError(
                f"the states have fp32 master copies of {len(whole)} parameters, the first of them {whole[0]}, which aren't "
                "partitioned: copies and precise states have no place, and were not loaded. Compile the model with "
                'options={"master": "float32"}, call it once under torch.no_grad(), then load again; or use zinf_compile.save '
                "and zinf_compile.load, which need no such call, and round the states of a model that keeps no copies"
            )
        tensors = {key: torch.tensor(v, dtype=getattr(torch, t)).view(s) for key, (t, s, v) in settings["tensors"].items()}
        small = {named[name]: values for name, values in decode(settings["small"], "small", tensors).items()}
        for (parameter, state), value in self._whole.items():
            if parameter in small:
                small[parameter].setdefault(state, value)
        end_loading(self._optimizer, decode(settings["groups"], "groups", tensors), small)

    def _name(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._names:
            raise CheckpointError(f"{type(self._optimizer).__name__} has a parameter that the model has not")
        return self._names[id(parameter)]

    def _small(self, value: torch.Tensor, unit: Unit | None) -> torch.Tensor:
        """Return a state that is not of its parameter's size: all ranks load it, rank 0 saves it."""
        return _whole(value, unit, self._begin)

    def _begin(self) -> None:
        if not self._loading:
            self._loading = True
            install()
            begin_loading(self._optimizer, {} if self._all_made else self._large, _MIDDLE)


class _WholeRange:
    """A tensor that each rank has."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def read(self, start: int, end: int) -> torch.Tensor:
        return self._tensor.detach().reshape(-1)[start:end].to("cpu", copy=True)

    @torch.no_grad()
    def write(self, start: int, values: torch.Tensor) -> None:
        self._tensor.copy_(values.view(self._tensor.shape))


class _ParameterRange:
    """This rank's shard of a parameter, in the pieces in which it is kept."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        backing = unit.backing
        self._shard = DeviceShard(unit, unit.shard) if backing is None else BackedShard(unit, backing, unit.dtype)
        self._replaced = False

    def read(self, start: int, end: int) -> torch.Tensor:
        if not self._replaced:
            self._unit.wait_updated()
            self._unit.check_whole()
        found = [
            self._shard.fetch(low, high)()[max(start, low) - low : min(end, high) - low].clone()
            for low, high in pieces_of(self._unit)
            if low < end and start < high
        ]
        return torch.cat(found) if len(found) != 1 else found[0]

    def write(self, start: int, values: torch.Tensor) -> None:
        end = start + values.numel()
        for low, high in pieces_of(self._unit):
            if low < end and start < high:
                piece = self._shard.fetch(low, high)()
                piece[max(start, low) - low : min(end, high) - low] = values[max(start, low) - start : min(end, high) - start]
                self._shard.write(low, piece).wait()

    def begin(self) -> None:
        """Refuse the parameter until all of it is replaced."""
        if not self._replaced:
            self._replaced = True
            self._unit.begin_replacing()
            self._unit.changing()
            self._unit.spoil(_MIDDLE)


def _whole(value: torch.Tensor, unit: Unit | None, before_writing: Callable[[], object]) -> DcpTensor:
    """Return what each rank has whole: all ranks load it, rank 0 saves it."""
    part = ShardPart(Rectangle((0,) * value.dim(), tuple(value.shape)), 0, None)
    saves = unit is None or unit.shard_group.rank == 0
    return DcpTensor(value.shape, value.dtype, [part], _WholeRange(value), before_writing, saves)


def _parameter(parameter: ShardedParameter) -> DcpTensor:
    unit = parameter._zinf_unit
    values = _ParameterRange(unit)
    return _tensor(parameter, unit, unit.dtype, values, values.begin)


def _tensor(parameter: torch.Tensor, unit: Unit, dtype: torch.dtype, values: ShardRange, before_writing: Any) -> DcpTensor:
    rank, numel = unit.shard_group.rank, parameter.numel()
    stretches = [
        (begin, min(begin + _PART_NUMEL, end), place + begin - start)
        for start, end, place in stretches_of(unit.spans, rank, numel)
        for begin in range(start, end, _PART_NUMEL)
    ]
    parts = shard_parts(unit.shape, unit.stride, stretches)
    if not numel and rank == 0:
        parts = [ShardPart(Rectangle((0,) * parameter.dim(), tuple(parameter.shape)), 0, None)]
    return DcpTensor(parameter.shape, dtype, parts, values, before_writing)
