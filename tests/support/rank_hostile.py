"""Checkpoints that one rank or all of them find at fault: all of them say so, by file and tensor."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from models import Mlp

import zinf_compile
from zinf_compile.checkpoint import safetensors_reader
from zinf_compile.errors import CheckpointError


def refuse_on_ranks(rank: int, _size: int, folder: str) -> bool:
    """Open what no rank can read, then what one alone can't, then what becomes shorter while one rank reads it."""
    whole = Mlp()
    path = Path(folder) / "model.safetensors"
    own = Path(folder) / str(rank) / "model.safetensors"
    own.parent.mkdir()
    if rank == 0:
        header = json.dumps({"first.weight": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        zinf_compile.save_safetensors(whole, own.parent)
    else:
        os.mkfifo(own)
    torch.distributed.barrier()

    with torch.device("meta"):
        model = Mlp()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged .*first\.weight has the data_offsets \[-8, 0\]"):
        zinf_compile.partition(model, checkpoint=path)
    with pytest.raises(CheckpointError, match=r"1/model\.safetensors is a FIFO"):
        zinf_compile.partition(model, checkpoint=own)

    torch.distributed.barrier()
    if rank:
        own.unlink()
        zinf_compile.save_safetensors(whole, own.parent)
        really = safetensors_reader.read_at
        safetensors_reader.read_at = lambda fd, into, offset: really(fd, into, 1 << 40)
    with pytest.raises(CheckpointError, match=r"1/model\.safetensors ends within tensor \w+\.\w+"):
        zinf_compile.partition(model, checkpoint=own)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    return True
