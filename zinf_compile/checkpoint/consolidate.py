"""Writes the model of a saved checkpoint as safetensors in the layout of transformers, piece by piece.

Called by `zinf consolidate`; needs no model, and memory for one piece of a tensor.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.sizes import parse_bytes

from .folder_update import FolderUpdate
from .safetensors_writer import write_file
from .save_safetensors import plan_files, replace_files
from .saved_files import SavedFiles

PIECE_BYTES = 32 << 20
"""Read and written at a time; beside it, as much of a part that was saved in another order of memory."""

BESIDE = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt",
    "vocab.txt", "chat_template.jinja",
)  # fmt: skip
"""Files of transformers that are copied where they lie beside a checkpoint; none is made."""


def consolidate(files: SavedFiles, out: str | os.PathLike[str], *, file_bytes: int | str) -> list[str]:
    """Write the parameters and buffers of a checkpoint to a folder; return the names of the files.

    Names, shapes and types are those of the model; tied tensors are written once, under their first name. A process that is
    killed at any moment leaves the old files of the folder or the new ones. Raises `CheckpointError` for a damaged checkpoint,
    one without a model and a folder that it lies in, `OSError` with errno and path.
    """
    out = Path(out)
    most = parse_bytes(file_bytes, option="file_bytes")
    described = {
        key.removeprefix("model."): (tensor.dtype, tensor.shape)
        for key, tensor in files.tensors.items()
        if key.startswith("model.")
    }
    if not described:
        raise CheckpointError(f"{files.folder} has no model: none of its {len(files.tensors)} tensors begins with 'model.'")
    if out.exists() and out.resolve() in (files.folder.resolve(), files.folder.parent.resolve()):
        raise CheckpointError(f"{out} is the folder of the checkpoint itself; accepted: another one, new or not")
    sizes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in described.items()}
    total = sum(tensor.nbytes for tensor in sizes.values())
    plan = plan_files(sizes, most, tag=secrets.token_hex(8))
    update = FolderUpdate(out)
    try:
        update.begin()
        _check_space(out, total)
        for file, names in plan.items():
            update.write(file, lambda path, names=names: _write(files, path, {name: described[name] for name in names}))  # type: ignore[misc]
        replace_files(update, plan, total)
    finally:
        update.end()
    return [*plan, *_copy_beside(files.folder, out)]


def _write(files: SavedFiles, path: Path, described: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    def values(name: str) -> Iterator[torch.Tensor]:
        dtype, shape = described[name]
        numel, step = math.prod(shape), max(1, format_of(dtype).numel_within(PIECE_BYTES))
        for start in range(0, numel, step):
            piece = torch.empty(min(step, numel - start), dtype=dtype)
            files.read(f"model.{name}", start, piece)
            yield piece

    write_file(described, path, {"format": "pt"}, values)


def _check_space(out: Path, wanted: int) -> None:
    found = shutil.disk_usage(out).free
    if found < wanted:
        raise OSError(errno.ENOSPC, f"the model needs {wanted:,} bytes, {found:,} are free; nothing was written", os.fspath(out))


def _copy_beside(folder: Path, out: Path) -> Sequence[str]:
    """Copy configurations and tokenizers that lie in the checkpoint or beside it; those in `out` stay."""
    copied = []
    for name in BESIDE:
        source = next((path for path in (folder / name, folder.parent / name) if path.is_file()), None)
        if source is not None and not (out / name).exists():
            shutil.copyfile(source, out / name)
            copied.append(name)
    return copied
