"""Buffers that differ from rank to rank, such as running means of each rank's own batches, in a checkpoint: each rank's own.

Called by `save` and `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.storage.engine import crc32c
from zinf_compile.sharded.tensor import ShardedTensor

from .random_states import number_of_this_rank
from .rank_contents import RankContents

if TYPE_CHECKING:
    from .saved_files import SavedFiles


def add_local_buffers(contents: RankContents, names: Mapping[str, torch.Tensor], ranks: Ranks | None) -> None:
    """Add those buffers by name that are not the same on all ranks. A collective operation."""
    buffers = _buffers(names)
    if ranks is None or ranks.size == 1 or not buffers:
        return
    mine = [crc32c(buffer.detach().reshape(-1).cpu().contiguous().view(torch.uint8)) for buffer in buffers.values()]
    everyone = ranks.exchange(torch.tensor(mine, dtype=torch.float64), what="comparing buffers")
    for number, (name, buffer) in enumerate(buffers.items()):
        if (everyone[:, number] != everyone[0, number]).any():
            for rank in range(ranks.size):
                contents.add_whole(f"buffer.{rank}.{name}", buffer, rank=rank)


def load_local_buffers(files: SavedFiles, names: Mapping[str, torch.Tensor], ranks: Ranks | None) -> None:
    """Replace buffers by this rank's own, where the checkpoint has them; other ranks keep what is in the model's state."""
    rank = number_of_this_rank(ranks)
    for name, buffer in _buffers(names).items():
        key = f"buffer.{rank}.{files.settings['aliases'].get(name, name)}"
        if key in files.tensors:
            buffer.copy_(files.whole(key))


def _buffers(names: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in names.items():
        if not isinstance(tensor, nn.Parameter | ShardedTensor):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())
