"""Gradients that parameters have already when they are spread over ranks: of eager code, or loaded. They are spread with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.unit import Unit

from .eager_gradients import gradient_of_shard, partitioned_gradient

_NONE, _OWN, _EQUAL = 0.0, 1.0, 2.0
"""What a rank has of a parameter: no gradient, one of its own batches, or the one of all ranks."""


def note_equal(gradient: torch.Tensor) -> None:
    """Note that all ranks have this gradient, until it is changed."""
    gradient._zinf_equal_at = gradient._version  # type: ignore[attr-defined]


def spread_gradients(
    gradients: dict[int, torch.Tensor], partitioned: Sequence[tuple[nn.Parameter, Unit]], context: Context
) -> None:
    """Give parameters their earlier whole gradients as their shards: the mean over the ranks, and of none where a rank has none.

    `gradients`: this rank's, by the number of the parameter in `partitioned`; taken out one by one. A collective operation; on
    one rank, where a whole gradient is at hand, nothing is done.
    """
    if context.size == 1 or not partitioned:
        return
    own = [_kind(gradients.get(number)) for number in range(len(partitioned))]
    everyone = context.ranks.exchange(torch.tensor(own, dtype=torch.float64), what="looking for earlier gradients")
    for number, (parameter, unit) in enumerate(partitioned):
        kinds = set(everyone[:, number].tolist())
        if kinds == {_NONE}:
            continue
        gradient = gradients.pop(number, None)
        if gradient is None:
            gradient = torch.zeros(unit.shape, dtype=unit.dtype, device=unit.device)
        if kinds == {_EQUAL}:
            parameter.grad = gradient_of_shard(unit, unit.local_part(gradient).to(unit.reduce_dtype))
        else:
            parameter.grad = partitioned_gradient(unit, gradient)


def _kind(gradient: torch.Tensor | None) -> float:
    if gradient is None:
        return _NONE
    return _EQUAL if getattr(gradient, "_zinf_equal_at", None) == gradient._version else _OWN
