"""A mark beside one rank's states, for savers that take what has the same name on all ranks for copies of one value.

`torch.distributed.checkpoint.save` does, where it is given an optimizer's `state_dict()`: it would keep one rank's for all.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from zinf_compile.errors import CheckpointError

OWN = "own"
"""Key of the mark in a shard's layout."""


class OwnShards(torch.Tensor):
    """A tensor that `torch.distributed.checkpoint` asks how it is saved and loaded, and that refuses both.

    Pickled as a plain tensor. As such it still is of other dimensions on rank 0 than on the others, which a save refuses too.
    """

    @staticmethod
    def of(rank: int) -> OwnShards:
        """Return the mark of a rank's states."""
        with torch.inference_mode(False):
            return torch.zeros((1,) if rank == 0 else (1, 1)).as_subclass(OwnShards)

    def __create_write_items__(self, fqn: str, value: Any) -> NoReturn:
        _refuse("saved")

    def __create_chunk_list__(self) -> NoReturn:
        _refuse("loaded")

    def __deepcopy__(self, memo: Any) -> OwnShards:
        return self.clone().as_subclass(OwnShards)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def _refuse(done: str) -> NoReturn:
    raise CheckpointError(
        "an optimizer's state_dict() has one rank's own shards, which torch.distributed.checkpoint takes for copies of one "
        f"value: nothing was {done}. Give it zinf_compile.dcp_state_dict(model, optimizer), or use zinf_compile.save and load"
    )
