"""Saving on one of several ranks."""

from __future__ import annotations

from models import TiedWords, tokens
from training import BACKEND, adamw, plain_step

import zinf_compile
from zinf_compile.checkpoint import save_safetensors
from zinf_compile.errors import PartitionedParameterError


def save_on_ranks(rank: int, size: int, folder: str) -> tuple[list[str], str]:
    """Train a step and save; then fail to. Return the files and what the failure said."""
    model = TiedWords()
    model.compile(backend=BACKEND)
    plain_step(model, adamw(model.parameters()), tokens(0, rank))
    files = zinf_compile.save_safetensors(model, folder, file_bytes=1000)

    def broken(*_: object, **__: object) -> None:
        raise OSError("no space left")

    save_safetensors.save_file = broken
    said = ""
    try:
        zinf_compile.save_safetensors(model, folder)
    except (OSError, PartitionedParameterError) as error:
        said = str(error)
    return files, said
