"""Buffers that differ from rank to rank, such as running means of each rank's own batches, in a checkpoint: each rank's own.

Called by `save` and `load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.comm.ranks import Ranks
from zinf_compile.runtime.storage.engine import crc32c
from zinf_compile.sharded.synchronised_buffers import note_synchronised
from zinf_compile.sharded.tensor import ShardedTensor

from .random_states import number_of_this_rank
from .rank_contents import RankContents

if TYPE_CHECKING:
    from .checkpoint_files import CheckpointFiles


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
                contents.add_whole(_key(rank, name), buffer, rank=rank)


def add_any_buffers(contents: RankContents, names: Mapping[str, torch.Tensor], size: int) -> None:
    """Add each rank's values of all buffers, as if they were not the same."""
    for name, buffer in _buffers(names).items() if size > 1 else ():
        for rank in range(size):
            contents.add_whole(_key(rank, name), buffer, rank=rank)


def local_buffers_of(files: CheckpointFiles, names: Mapping[str, torch.Tensor], ranks: Ranks | None) -> dict[str, torch.Tensor]:
    """Return this rank's buffers by the keys of their own values in a checkpoint, where it has such.

    Raises `CheckpointError` where those are of other shapes.
    """
    rank, aliases = number_of_this_rank(ranks), files.settings.get("aliases", {})
    found = {_key(rank, aliases.get(name, name)): buffer for name, buffer in _buffers(names).items()}
    found = {key: buffer for key, buffer in found.items() if key in files.tensors}
    problems = [
        f"{key}: {list(files.tensors[key].shape)} in the checkpoint, {list(buffer.shape)} in the model"
        for key, buffer in found.items()
        if files.tensors[key].shape != tuple(buffer.shape)
    ]
    if problems:
        raise CheckpointError(f"{files.folder} doesn't fit; nothing was changed. {'; '.join(problems)}")
    return found


def load_local_buffers(files: CheckpointFiles, buffers: Mapping[str, torch.Tensor], names: Mapping[str, torch.Tensor]) -> None:
    """Replace buffers by this rank's own, where the checkpoint has them; other ranks keep what is in the model's state.

    A graph's first call, which gives all ranks the buffers of rank 0, leaves those out of which the checkpoint has each rank's.
    """
    for key, buffer in buffers.items():
        buffer.copy_(files.whole(key))
    aliases = files.settings.get("aliases", {})
    for name, buffer in _buffers(names).items():
        if _key(0, aliases.get(name, name)) in files.tensors:
            note_synchronised(buffer)


def _key(rank: int, name: str) -> str:
    """Return the key of a rank's own values of a buffer in a checkpoint."""
    return f"buffer.{rank}.{name}"


def _buffers(names: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in names.items():
        if not isinstance(tensor, nn.Parameter | ShardedTensor):
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())
