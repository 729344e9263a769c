"""Calls of user code on partitioned tensors, before autograd sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf_compile._frames import inside_compiled_call
from zinf_compile._torch import no_torch_function, tree_leaves
from zinf_compile.errors import PartitionedParameterError
from zinf_compile.runtime.context import Context

from .data_assignment import AUGMENTED
from .gradient import ShardedGradient
from .metadata_calls import LIKE, METADATA
from .operands import has_whole_values, is_scalar
from .partition_alike import partition_targets
from .reductions import REDUCTIONS
from .tensor import ShardedTensor, first_sharded, is_refusal, reads_memory
from .whole_values import on_whole_values

_PARTITIONED = (ShardedTensor, ShardedGradient)
_MIXES = frozenset(["addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "masked_scatter", "matmul", "mm", "mv", "outer", "put"])
"""Operators whose results have elements of several of their arguments'; `index_*` and `scatter*` besides. None is partitioned."""

_ASSIGN_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""What `tensor.data = value` calls."""

_VIEWS = frozenset(
    ["flatten", "permute", "reshape", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unflatten", "unsqueeze", "view"]
)
"""Functions whose numbers are of dimensions."""


@torch.compiler.disable  # what runs between two graphs: nothing to capture
def answer_call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of which an argument is a `ShardedTensor`, none a parameter: on shards, or else on whole values."""
    try:
        return _call_on_shards(func, args, kwargs)
    except PartitionedParameterError as error:
        if not is_refusal(error) or (result := on_whole_values(func, args, kwargs)) is NotImplemented:
            raise
        return result


def _call_on_shards(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    owner = first_sharded((args, kwargs))
    assert owner is not None, "it was called for one"
    if reads_memory(name):
        owner.refuse(name)
    if func == _ASSIGN_DATA and isinstance(args[0], ShardedTensor):
        args[0].replace(args[1])
        return None
    if name not in ("__get__", "__set__"):
        if not _mixes_elements(name):
            partition_targets(name, written(name, args, kwargs), args, kwargs)
        if name == "copy_":
            args = _without_gradient(args)
        _leave_to_whole_values(name, owner, args, kwargs)
        _reject_differentiable(name, owner, args, kwargs)
    with no_torch_function():
        result = func(*args, **kwargs)
    if owner.unit.shard_group.size == 1 or name in ("__get__", "__set__") or not _all_sharded(args):
        return result
    if isinstance(result, (list, tuple)):
        return type(result)(_shared(value, owner, name) for value in result)
    return _shared(result, owner, name)


def _mixes_elements(name: str) -> bool:
    """Say whether a function of this name changes a tensor by more than single elements, as `addmm_`."""
    return name.rstrip("_") in _MIXES or name.startswith(("index_", "scatter"))


def written(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return what a function of this name changes in place."""
    found = [kwargs["out"]] if isinstance(kwargs.get("out"), torch.Tensor) else []
    if args and ((name.endswith("_") and not name.endswith("__")) or name in AUGMENTED):
        found += args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    return found


def _without_gradient(args: Sequence[Any]) -> Sequence[Any]:
    """Return arguments of `copy_` with a source that needs no gradient, where the target is detached.

    Who copies a trained tensor to a parameter, `p.detach().copy_(q)`, drops what autograd would have recorded. The target keeps
    in mind that nothing was: differentiable calls on it are refused.
    """
    target, *rest = args
    if not isinstance(target, ShardedTensor) or target.requires_grad or not rest or not isinstance(rest[0], torch.Tensor):
        return args
    partitioned = isinstance(rest[0], ShardedTensor | ShardedGradient)
    target.lost_gradient = torch.is_grad_enabled() and rest[0].requires_grad and not partitioned
    return (target, rest[0].detach(), *rest[1:]) if target.lost_gradient else args


def _leave_to_whole_values(name: str, owner: ShardedTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse what a forward computes on several ranks beside activations, or numbers, which may have been made of them.

    These differ from rank to rank. A tensor that is made like a parameter is to be filled with them.
    """
    if owner.unit.shard_group.size == 1 or not (_may_record(name) or name in LIKE):
        return
    if any(isinstance(target, _PARTITIONED) for target in written(name, args, kwargs)):
        return
    leaves = tree_leaves((args, kwargs))
    shared = all(isinstance(value, _PARTITIONED) for value in leaves if isinstance(value, torch.Tensor))
    constant = name in REDUCTIONS or name in _VIEWS or not any(isinstance(value, int | float | complex) for value in leaves)
    if not (shared and constant and name not in LIKE) and inside_compiled_call():
        owner.refuse(name, "in a forward, what stands beside it differs from rank to rank", answered_by_whole=True)


def _reject_differentiable(name: str, owner: ShardedTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not torch.is_grad_enabled() or name == "equal":
        return
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, ShardedTensor) and value.lost_gradient and _may_record(name):
            value.refuse(
                name,
                "a tensor that requires grad was copied to it, whose gradient is not computed: detach() the copy, or the source",
            )
        whole = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor | ShardedGradient)
        if whole and value.requires_grad and not is_scalar(value) and value.shape == owner.shape:
            because = "beside a whole tensor that requires grad, whose gradient would be spread over the ranks"
            owner.refuse(name, because, answered_by_whole=has_whole_values(owner.unit))


def _may_record(name: str) -> bool:
    """Say whether a call's result may be differentiated: it isn't one that reads metadata or changes a tensor in place."""
    in_place = name.endswith("_") and not name.endswith("__")
    return not in_place and name != "detach" and name not in METADATA and not name.startswith(("is_", "_is_"))


def _all_sharded(args: Sequence[Any]) -> bool:
    """Return whether all arguments that may require grad are partitioned: the result is then the same on all ranks."""
    tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
    return all(isinstance(value, ShardedTensor | ShardedGradient) or not value.requires_grad for value in tensors)


def _shared(value: Any, owner: ShardedTensor, name: str) -> Any:
    whole = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor | ShardedGradient)
    if not whole or not value.requires_grad or not torch.is_grad_enabled():
        return value
    return _Shared.apply(value, owner.unit.context, f"backward of {owner.describe(name)[0]}")


class _Shared(torch.autograd.Function):
    """A number that all ranks have computed from their shards together, as a part of each rank's loss.

    The gradient of a parameter is the mean of what the ranks' losses have: so is the gradient of this number, of which each rank
    then computes that of its shard.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, context: Context, what: str) -> torch.Tensor:
        ctx.context, ctx.what = context, what
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ranks = ctx.context.ranks.exchange(grad.double().reshape(-1), what=ctx.what)
        mean = ranks[0] if bool((ranks == ranks[0]).all()) else ranks.sum(0) / len(ranks)
        return mean.reshape(grad.shape).to(device=grad.device, dtype=grad.dtype), None, None
