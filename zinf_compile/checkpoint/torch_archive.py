"""Files of `torch.save`: values and tensors without executing anything in them, and elements of tensors read by ranges.

A file is a zip archive of a pickle and one uncompressed member for each storage. Only the directory and the pickle are read;
everything that the pickle says of a tensor is checked against the bytes that are there. Called by the importers.
"""

from __future__ import annotations

import dataclasses
import lzma
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from zinf_compile.errors import CheckpointError

from .pickled import MOST_BYTES, Unknown, read_pickle
from .regular_file import open_regular

_STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16, "LongStorage": torch.int64,
    "BFloat16Storage": torch.bfloat16, "IntStorage": torch.int32, "ShortStorage": torch.int16, "CharStorage": torch.int8,
    "ByteStorage": torch.uint8, "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_DTYPES = {
    str(dtype): dtype
    for dtype in (*_STORAGES.values(), torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
}
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_MOST_DIMS = 64
_DAMAGED = (RuntimeError, EOFError, ArithmeticError, OSError, ValueError, LookupError)
"""What `zipfile` raises beside its own, for directories with errors in them."""


@dataclasses.dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype | None
    """None: bytes without a type."""
    offset: int
    """Of its first byte in the file."""
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ArchivedTensor:
    """A tensor in a file of `torch.save`, whose bytes are there; none is read yet."""

    archive: TorchArchive
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    """Offset of its first element in the file."""

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def read(self, start: int, into: torch.Tensor) -> None:
        """Fill a flat host tensor of its type with elements, in row-major order, from number `start` on."""
        if not into.numel():
            return
        size = self.dtype.itemsize
        if _is_row_major(self.shape, self.stride):
            self.archive.fill(into, self.begin + start * size)
            return
        whole = torch.empty(_extent(self.shape, self.stride), dtype=self.dtype)
        self.archive.fill(whole, self.begin)
        into.copy_(whole.as_strided(self.shape, self.stride).reshape(-1)[start : start + into.numel()])

    def whole(self) -> torch.Tensor:
        """Return all elements, in its shape."""
        flat = torch.empty(self.numel(), dtype=self.dtype)
        self.read(0, flat)
        return flat.view(self.shape)


class TorchArchive:
    """One file of `torch.save`; `value` is what was saved, with an `ArchivedTensor` for each tensor.

    Raises `CheckpointError`, naming the file, where it is none, is damaged, or says of a tensor what can't be.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = open_regular(self.path)
        try:
            self._size = os.fstat(self._fd).st_size
            with open(os.dup(self._fd), "rb") as file:
                self.value = self._read(file)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def fill(self, into: torch.Tensor, offset: int) -> None:
        """Fill a flat host tensor with the bytes from `offset` on."""
        view = memoryview(into.view(torch.uint8).numpy().data)
        while view:
            count = os.preadv(self._fd, [view], offset)
            if not count:
                raise CheckpointError(f"{self.path} ends at byte {offset:,}: it was changed while it was read")
            view, offset = view[count:], offset + count

    def _read(self, file: Any) -> Any:
        try:
            with zipfile.ZipFile(file) as found:
                members = found.infolist()
                names = {member.filename: member for member in members}
                pickles = [name for name in names if name.endswith("/data.pkl")]
                if len(names) != len(members) or len(pickles) != 1:
                    raise CheckpointError(f"{self.path} is no file of torch.save: it has {len(pickles)} members data.pkl")
                prefix = pickles[0].removesuffix("data.pkl")
                if names[pickles[0]].file_size > MOST_BYTES:
                    raise CheckpointError(f"{self.path} has a pickle of more than {MOST_BYTES:,} bytes")
                order = found.open(f"{prefix}byteorder").read(20) if f"{prefix}byteorder" in names else b"little"
                if order != b"little":
                    raise CheckpointError(f"{self.path} is of a machine of byte order {order!r}; accepted: little")
                text = found.read(pickles[0])
        except CheckpointError:
            raise
        except (*_DAMAGED, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error) as error:
            raise CheckpointError(
                f"{self.path} is no file of torch.save, or was not written to its end ({error}). Fetch it again; one that a "
                "PyTorch before 1.6 has written is loaded and saved again by a newer one; what is in a file of safetensors, "
                "zinf_compile.load_full_state_dict(model, safetensors.torch.load_file(file)) loads"
            ) from error
        self._members, self._prefix = names, prefix
        return read_pickle(text, self._known(), self._storage, str(self.path))

    def _known(self) -> dict[str, Any]:
        return {
            "collections.OrderedDict": dict,
            "torch.Size": tuple,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._typed_tensor,
            "torch._utils._rebuild_parameter": lambda data, *_: _checked(data),
            "torch._utils._rebuild_parameter_with_state": lambda data, *_: _checked(data),
            "torch._tensor._rebuild_from_type_v2": _same_tensor,
            **{f"torch.{name}": Kind(dtype) for name, dtype in _STORAGES.items()},
            **{f"torch.storage.{name}": Kind(None) for name in ("UntypedStorage",)},
            **{name: Kind(dtype) for name, dtype in _DTYPES.items()},
        }

    def _storage(self, reference: Any) -> _Storage:
        match reference:
            case ("storage", Kind(dtype), str(key), str(), int(count)) if type(count) is int and count >= 0:
                nbytes = count * (1 if dtype is None else dtype.itemsize)
            case _:
                raise CheckpointError(f"its pickle refers to {str(reference)[:80]!r}, which is no storage")
        member = self._members.get(f"{self._prefix}data/{key}")
        if member is None:
            raise CheckpointError(f"storage {key[:80]!r} is missing")
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise CheckpointError(f"storage {key[:80]!r} is compressed or encrypted, which torch.save never does")
        if member.file_size != nbytes:
            raise CheckpointError(f"storage {key[:80]!r} has {member.file_size:,} bytes, of {nbytes:,} that the pickle says")
        return _Storage(key, dtype, self._data_of(member), nbytes)

    def _data_of(self, member: zipfile.ZipInfo) -> int:
        """Return the offset of a member's data."""
        raw = os.pread(self._fd, _LOCAL_HEADER.size, member.header_offset) if 0 <= member.header_offset < self._size else b""
        if len(raw) != _LOCAL_HEADER.size or raw[:4] != b"PK\3\4":
            raise CheckpointError(f"member {member.filename[:80]!r} has no header at byte {member.header_offset:,}")
        *_, name_length, extra_length = _LOCAL_HEADER.unpack(raw)
        begin: int = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if begin + member.file_size > self._size:
            raise CheckpointError(f"member {member.filename[:80]!r} ends beyond the file")
        return begin

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> ArchivedTensor:
        if not isinstance(storage, _Storage) or storage.dtype is None:
            raise CheckpointError("a tensor has no storage of a type")
        return self._checked_tensor(storage, storage.dtype, offset, shape, stride)

    def _typed_tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> ArchivedTensor:
        dtype = rest[2] if len(rest) > 2 else None  # behind requires_grad and hooks
        if not isinstance(storage, _Storage) or not isinstance(dtype, Kind) or dtype.dtype is None:
            raise CheckpointError("a tensor has no storage, or no type")
        return self._checked_tensor(storage, dtype.dtype, offset, shape, stride)

    def _checked_tensor(self, storage: _Storage, dtype: torch.dtype, offset: Any, shape: Any, stride: Any) -> ArchivedTensor:
        if type(offset) is not int or offset < 0 or not _are_sizes(shape) or not _are_sizes(stride) or len(shape) != len(stride):
            raise CheckpointError(
                f"a tensor has the offset {str(offset)[:40]}, shape {str(shape)[:80]} and strides {str(stride)[:80]}; accepted: "
                "whole numbers from 0 on, as many strides as lengths"
            )
        end = (offset + _extent(shape, stride)) * dtype.itemsize
        if math.prod(shape) and end > storage.nbytes:
            raise CheckpointError(
                f"a tensor {list(shape)} ends at byte {end:,} of storage {storage.key[:80]!r}, which has {storage.nbytes:,}"
            )
        if math.prod(shape) > max(storage.nbytes // dtype.itemsize, 1):
            raise CheckpointError(f"a tensor {list(shape)} has more elements than its storage of {storage.nbytes:,} bytes")
        return ArchivedTensor(self, dtype, tuple(shape), tuple(stride), storage.offset + offset * dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A class of storages, or a data type, that a pickle names; None: bytes without a type."""

    dtype: torch.dtype | None


def _checked(data: Any) -> ArchivedTensor:
    if not isinstance(data, ArchivedTensor):
        raise CheckpointError(f"a parameter is made of a {type(data).__name__}, not of a tensor")
    return data


def _same_tensor(make: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    """Return a tensor with attributes, or of a subclass, as a plain one; what else it may be stays unknown."""
    function = getattr(make, "function", None)
    if function is None or not isinstance(arguments, tuple) or not (isinstance(kind, Unknown) and kind.name == "torch.Tensor"):
        return Unknown("torch._tensor._rebuild_from_type_v2", (make, kind, arguments), made=True)
    return _checked(function(*arguments))


def _are_sizes(value: Any) -> bool:
    return (
        isinstance(value, tuple) and len(value) <= _MOST_DIMS and all(type(each) is int and 0 <= each < 1 << 62 for each in value)
    )


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements from the first to the last one in memory."""
    if not math.prod(shape):
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and found != step:
            return False
        step *= size
    return True
