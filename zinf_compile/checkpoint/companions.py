"""Tensors of a model's state that are partitioned like a parameter, such as averages kept as buffers: each rank's own shard.

Called by `save` (through `RankContents`) and `load`. A twin of a parameter, as in an `AveragedModel`, is a parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from zinf_compile.runtime.units.shard_values import pieces_of
from zinf_compile.sharded.tensor import ShardedTensor

from .fill_shards import ShardToFill
from .shard_reader import ShardReader

if TYPE_CHECKING:
    from .checkpoint_files import CheckpointFiles


def companion_pieces(key: str, tensor: ShardedTensor) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the elements of this rank's shard with the number of the first one, flat in host memory."""
    for start, end in pieces_of(tensor.unit):
        yield key, start, tensor.shard_values.fetch(start, end)()


def companion_to_fill(files: CheckpointFiles, key: str, tensor: ShardedTensor) -> ShardToFill:
    """Return what replaces this rank's elements by those of a checkpoint."""
    values = tensor.shard_values
    return ShardToFill(ShardReader(files, key, tensor.unit, tensor.stride()), tensor.unit, values.dtype, values.write)


def companion_filled(tensor: ShardedTensor) -> None:
    """Note that they were replaced."""
    tensor.shard_values.restored()
    tensor.shard_values.changed("zinf_compile.load")
