"""In-place changes of a shard, piece by piece, that mark it incomplete when they end in their middle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from zinf_compile.errors import StepFailedError

from .shard_values import ShardValues


@contextlib.contextmanager
def spoiling(target: ShardValues, operator: str) -> Iterator[Callable[[torch.Tensor], ShardValues]]:
    """Context of a change of `target`, of whose pieces some are changed and some are not if it ends with an error.

    Gives what `over_pieces` calls before it keeps the first piece. From then on such an error is a `StepFailedError`, and reading
    the target goes on raising it.
    """
    begun: list[bool] = []

    def into(_: torch.Tensor) -> ShardValues:
        begun.append(True)
        return target

    try:
        yield into
    except BaseException as error:
        if not begun:
            raise
        why = (
            f"{operator}() of {target.unit.name} ended in its middle: the values are incomplete, some are changed and others are "
            "not. Load a checkpoint of model and optimizer, both from before that, and go on from there"
        )
        target.spoil(why)
        if not isinstance(error, Exception):
            raise
        raise StepFailedError(f"{why}. Cause: {error}") from error
