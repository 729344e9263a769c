"""Memory mapped from a file: the kernel may take it back at any time, since the bytes are on the drive too."""

from __future__ import annotations

import mmap
import os

import torch

from .scratch_file import ScratchFile


def map_copy(value: torch.Tensor, folder: str) -> torch.Tensor:
    """Return a copy of flat host memory in a mapping of a file in `folder` that has no name.

    Its bytes are in the page cache only while somebody reads them. The file goes with the last tensor on the mapping. Raises
    `StoreError` where the folder has no room for it.
    """
    size = -(-max(1, value.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    file = ScratchFile(folder)
    try:
        file.reserve(size)  # a write to a mapping can't report a full disk
        mapping = mmap.mmap(file.file.fd, size)
        copy = torch.frombuffer(mapping, dtype=value.dtype, count=value.numel())  # holds the mapping, which holds the file
        copy.copy_(value)
        mapping.flush()
        mapping.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(file.file.fd, 0, size, os.POSIX_FADV_DONTNEED)
    finally:
        file.close()
    return copy
