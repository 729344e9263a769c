"""The tensors that a model on meta is given: of safetensors files, of what `save`, DeepSpeed or `torch.save` have written.

Called by `init/from_checkpoint`. Safetensors files are read ahead; of the others each range is read when it is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from zinf_compile.errors import CheckpointError
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.storage.engine import Engine

from .intake import DType, Intake, Rename, plan_intake
from .manifest import MANIFEST, saves_in
from .open_files import find_checkpoint, is_foreign, open_files
from .safetensors_reader import Reading, Stored, TensorFiles
from .saved_files import SavedFiles


def name_of_newest(path: Path) -> str:
    """Return the name of the newest checkpoint in a folder; "" for safetensors files and for what is no checkpoint."""
    try:
        saved = path.is_dir() and ((path / MANIFEST).exists() or saves_in(path))
        return find_checkpoint(path) if saved or is_foreign(path) else ""
    except (OSError, CheckpointError):
        return ""


def open_tensors(
    path: Path, name: str, targets: Mapping[str, torch.Tensor], *, dtype: DType | None, rename: Rename | None
) -> TensorFiles:
    """Open the tensors for a model's `targets`; `name`: of the checkpoint in the folder. Raises `CheckpointError`."""
    if name:
        return CheckpointTensors(open_files(path / name, targets, [], dtype=dtype, rename=rename))
    files = TensorFiles(path)
    if dtype is None and rename is None:
        return files
    try:
        stored = {key: tensor.dtype for key, tensor in files.tensors.items()}
        return ConvertedTensors(files, plan_intake(stored, rename, dtype, path))
    except BaseException:
        files.close()
        raise


class CheckpointTensors(TensorFiles):
    """The model of a checkpoint, tied tensors by each of their names."""

    def __init__(self, files: SavedFiles) -> None:
        self._files = files
        self.path = files.folder
        self._keys = {key.removeprefix("model."): key for key in files.tensors if key.startswith("model.")}
        self._keys |= {alias: f"model.{name}" for alias, name in files.settings.get("aliases", {}).items()}
        found = {name: files.tensors[key] for name, key in self._keys.items()}
        self.tensors = {name: Stored(self.path, saved.dtype, saved.shape, 0) for name, saved in found.items()}

    def begin(self, name: str, numel: int, *, start: int, engine: Engine, pool: BufferPool) -> Reading:
        """See `TensorFiles.begin`; the elements are read when they are wanted."""
        return _ReadLater(self, name, start)

    def read(self, name: str, into: torch.Tensor, *, start: int = 0) -> None:
        """See `TensorFiles.read`."""
        if into.numel():
            self._files.read(self._keys[name], start, into)

    def close(self) -> None:
        """See `TensorFiles.close`."""
        self._files.close()


class ConvertedTensors(TensorFiles):
    """Safetensors files under other names and in other types."""

    def __init__(self, files: TensorFiles, intake: Intake) -> None:
        self._files = files
        self.path = files.path
        self._old = {new: old for old, new in intake.names.items()}
        self.tensors = {
            new: Stored(stored.path, intake.dtypes[new], stored.shape, stored.start)
            for new, stored in ((intake.names[old], stored) for old, stored in files.tensors.items())
        }

    def begin(self, name: str, numel: int, *, start: int, engine: Engine, pool: BufferPool) -> Reading:
        """See `TensorFiles.begin`."""
        stored = self._files.tensors[self._old[name]].dtype
        reading = self._files.begin(self._old[name], numel, start=start, engine=engine, pool=pool)
        assert isinstance(stored, torch.dtype), "it was found to fit"
        return reading if stored == self.tensors[name].dtype else _Converting(reading, stored)

    def read(self, name: str, into: torch.Tensor, *, start: int = 0) -> None:
        """See `TensorFiles.read`."""
        stored = self._files.tensors[self._old[name]].dtype
        assert isinstance(stored, torch.dtype), "it was found to fit"
        values = into if stored == into.dtype else torch.empty(into.numel(), dtype=stored)
        self._files.read(self._old[name], values, start=start)
        if values is not into:
            into.copy_(values)

    def close(self) -> None:
        """See `TensorFiles.close`."""
        self._files.close()


class _ReadLater(Reading):
    """A read that takes place when it is waited for."""

    def __init__(self, files: CheckpointTensors, name: str, start: int) -> None:
        self._files, self._of, self._start = files, name, start

    def finish(self, into: torch.Tensor) -> None:
        self._files.read(self._of, into, start=self._start)


class _Converting(Reading):
    """A read of elements of another type."""

    def __init__(self, reading: Reading, dtype: torch.dtype) -> None:
        self._reading, self._dtype = reading, dtype

    def finish(self, into: torch.Tensor) -> None:
        values = torch.empty(into.numel(), dtype=self._dtype)
        self._reading.finish(values)
        into.copy_(values)
