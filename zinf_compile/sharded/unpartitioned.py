"""Parameters of a partitioned model that no graph uses: whole on every rank, their gradients averaged.

Where Dynamo leaves a part of a model to eager code (regional compilation, a loop around a graph break), that part's parameters
never reach the backend. On several ranks they must be trained like the rest, or the ranks would drift apart in silence.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zinf_compile.errors import RankMismatchError
from zinf_compile.ir.tiers import Placement
from zinf_compile.runtime.comm.fingerprint import fingerprint
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.system.process_wide import process_wide
from zinf_compile.runtime.units.whole_unit import whole_unit

from .parameter import ShardedParameter

_averaged: weakref.WeakSet[nn.Module] = process_wide(weakref.WeakSet())
"""Models whose other parameters are being averaged."""


def average_the_rest(partitioned: Sequence[nn.Parameter], context: Context, placement: Placement) -> None:
    """Average from now on the gradients of every other parameter of the models that `partitioned` belong to.

    A parameter partitioned later is averaged by its graph instead. Nothing is sent here: which module holds a parameter is
    looked up in the process, and each rank finds the same. They are added up like those of partitioned ones, in the
    type of `placement`, and returned in their own.
    """
    known = {id(parameter) for model in list(_averaged) for parameter in model.parameters()}
    if context.size == 1 or all(id(parameter) in known for parameter in partitioned):
        return
    for model in models_of(partitioned):
        _averaged.add(model)
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, ShardedParameter) and parameter.requires_grad and not is_averaged(parameter):
                average = _Average(parameter, name, context, placement.reduce_dtype_of(parameter.dtype))
                parameter._zinf_average = parameter.register_hook(average)  # type: ignore[attr-defined]
                parameter._zinf_whole = whole_unit(parameter, name, context)  # type: ignore[attr-defined]


def stop_averaging(parameter: nn.Parameter) -> None:
    """Stop averaging the gradient of a parameter that a graph now reduces."""
    vars(parameter).pop("_zinf_whole", None)
    handle = vars(parameter).pop("_zinf_average", None)
    if handle is not None:
        handle.remove()


def is_averaged(parameter: torch.Tensor) -> bool:
    """Return whether a whole parameter's gradient is averaged over the ranks."""
    return "_zinf_average" in vars(parameter)


class _Average:
    """A gradient hook: the mean over the ranks, summed in rank order."""

    def __init__(self, parameter: nn.Parameter, name: str, context: Context, dtype: torch.dtype) -> None:
        self._parameter = weakref.ref(parameter)
        self._name = name
        self._context = context
        self._dtype = dtype
        self._compared = False

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        context, parameter = self._context, self._parameter()
        what = f"averaging the gradient of {self._name}, which no compiled graph uses"
        context.ranks.agree([f"{self._name} {list(grad.shape)} {grad.dtype} in {self._dtype}"], what=what)
        if not self._compared and parameter is not None:
            self._compared = True
            try:
                context.ranks.agree([fingerprint(parameter)], what=f"comparing the values of {self._name}")
            except RankMismatchError as error:
                raise RankMismatchError(
                    f"parameter {self._name} is used outside the compiled graphs and so stays whole on each rank, but its values "
                    "differ between the ranks: seed all ranks alike before building the model (or load the same values), or "
                    f"compile all of the model. {error}"
                ) from None
        mean = grad.detach().to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        context.finish(context.lanes.reduce.submit(_all_reduce(mean, context)), what)
        return mean.to(grad.dtype)


def parameters_beside(partitioned: Iterable[nn.Parameter]) -> tuple[dict[str, nn.Parameter], list[ShardedParameter]]:
    """Return all other parameters of the models that `partitioned` belong to, by name, and those that are partitioned.

    No compiled graph uses the others. Of the partitioned ones some may be of no optimizer, as frozen ones.
    """
    others: dict[int, tuple[str, nn.Parameter]] = {}
    found: dict[int, ShardedParameter] = {}
    for model in models_of(partitioned):
        for name, parameter in model.named_parameters():
            if isinstance(parameter, ShardedParameter):
                found[id(parameter)] = parameter
            else:
                others.setdefault(id(parameter), (name, parameter))
    return dict(others.values()), list(found.values())


def _all_reduce(tensor: torch.Tensor, context: Context) -> Callable[[], None]:
    flat = tensor.view(-1)
    shard = flat.new_empty(-(-flat.numel() // context.size))

    def transfer() -> None:
        context.reductions.reduce_scatter([flat], [shard])
        full = context.reductions.full_buffer(flat.numel(), flat.dtype, flat.device)
        context.reductions.all_gather([shard], [full])
        flat.copy_(full)

    return transfer


def models_of(parameters: Iterable[torch.Tensor]) -> list[nn.Module]:
    """Return the outermost modules of this process that hold any of the parameters."""
    wanted = {id(parameter) for parameter in parameters}
    parents: dict[int, list[nn.Module]] = {}
    found: dict[int, nn.Module] = {}
    for module in _live_modules():
        for child in module._modules.values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
        if any(id(parameter) in wanted for parameter in module._parameters.values()):
            found[id(module)] = module
    stack, roots = list(found.values()), []
    while stack:
        module = stack.pop()
        above = [parent for parent in parents.get(id(module), ()) if id(parent) not in found]
        found.update({id(parent): parent for parent in above})
        stack += above
        if id(module) not in parents:
            roots.append(module)
    return roots or list(found.values())  # modules that hold each other have no outermost one


def _live_modules() -> list[nn.Module]:
    modules: list[Any] = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    return [module for module in modules if "_parameters" in vars(module) and "_modules" in vars(module)]
