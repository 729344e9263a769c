"""Safetensors files under other names and in other types, for a model on meta.

Called by `model_files`.
"""

from __future__ import annotations

import torch

from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.storage.engine import Engine

from .intake import Intake
from .safetensors_reader import Reading, Stored, TensorFiles


class ConvertedTensors(TensorFiles):
    """Safetensors files whose tensors have the names and types that an `Intake` says."""

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


class _Converting(Reading):
    """A read of elements of another type."""

    def __init__(self, reading: Reading, dtype: torch.dtype) -> None:
        self._reading, self._dtype = reading, dtype

    def finish(self, into: torch.Tensor) -> None:
        values = torch.empty(into.numel(), dtype=self._dtype)
        self._reading.finish(values)
        into.copy_(values)
