"""The files of a model's values: safetensors files, or what `save`, DeepSpeed or `torch.save` have written.

Called by `partition`, which gives a model on meta its values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.storage.engine import Engine

from .checkpoint_files import CheckpointFiles, Reading
from .converted_tensors import ConvertedTensors
from .intake import DType, Rename, plan_intake
from .manifest import MANIFEST, saves_in
from .open_files import find_checkpoint, is_foreign, open_files
from .safetensors_index import INDEX, SINGLE
from .safetensors_reader import TensorFiles, mismatches
from .saved_tensors import Saved


class SavedModel:
    """The model's tensors in a checkpoint, by name; the interface is that of `TensorFiles`."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files = files
        self.path = self._files.folder
        self._keys = {key.removeprefix("model."): key for key in self._files.tensors if key.startswith("model.")}
        self._keys |= {alias: f"model.{name}" for alias, name in self._files.settings.get("aliases", {}).items()}
        self.tensors: dict[str, Saved] = {name: self._files.tensors[key] for name, key in self._keys.items()}

    def check(self, wanted: Mapping[str, tuple[torch.Tensor, bool]], *, ignored: Any = None) -> list[str]:
        """See `TensorFiles.check`."""
        return mismatches(self.tensors, wanted, ignored)

    def begin(self, name: str, numel: int, *, start: int, engine: Engine, pool: BufferPool) -> Reading:
        """See `TensorFiles.begin`; its engine and buffers are its own."""
        return self._files.begin(self._keys[name], start, numel)

    def read(self, name: str, into: torch.Tensor, *, start: int = 0) -> None:
        """See `TensorFiles.read`."""
        self._files.read(self._keys[name], start, into)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


ModelFiles = TensorFiles | SavedModel


def open_model_files(
    path: str | os.PathLike[str],
    targets: Mapping[str, torch.Tensor],
    *,
    dtype: DType | None = None,
    rename: Rename | None = None,
) -> ModelFiles:
    """Open the files of a model for its tensors by name, under other names and in other types where that is asked for.

    What `save` or DeepSpeed have written is taken where the folder has no files as others write them. Raises `CheckpointError`.
    """
    path = Path(path)
    others = any((path / name).exists() for name in (SINGLE, INDEX))
    saved = path.is_dir() and ((path / MANIFEST).exists() or saves_in(path))
    if not others and (saved or is_foreign(path)):
        return SavedModel(open_files(path / find_checkpoint(path), targets=targets, optimizers=[], dtype=dtype, rename=rename))
    files = TensorFiles(path)
    if dtype is None and rename is None:
        return files
    try:
        stored = {name: tensor.dtype for name, tensor in files.tensors.items()}
        return ConvertedTensors(files, plan_intake(stored, rename, dtype, path))
    except BaseException:
        files.close()
        raise
