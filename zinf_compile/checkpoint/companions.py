"""Tensors of a model's state that are partitioned like a parameter, such as averages kept as buffers: each rank's own shard.

Called by `save` (through `RankContents`) and `load`. A twin of a parameter, as in an `AveragedModel`, is a parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from zinf_compile.runtime.units.shard_values import pieces_of
from zinf_compile.sharded.tensor import ShardedTensor

from .shard_reader import ShardReader, fill_shard

if TYPE_CHECKING:
    from .saved_files import SavedFiles


def companion_pieces(key: str, tensor: ShardedTensor) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the elements of this rank's shard with the number of the first one, flat in host memory."""
    for start, end in pieces_of(tensor.unit):
        yield key, start, tensor.shard_values.fetch(start, end)()


def load_companion(files: SavedFiles, key: str, tensor: ShardedTensor) -> None:
    """Replace this rank's elements by those of a checkpoint."""
    values = tensor.shard_values
    fill_shard(ShardReader(files, key, tensor.unit, tensor.stride()), tensor.unit, values.write)
    values.restored()
    values.changed("zinf_compile.load")
