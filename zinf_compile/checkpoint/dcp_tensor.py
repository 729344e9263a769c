"""A tensor of which `torch.distributed.checkpoint` saves and loads this rank's parts, each read or written when its turn comes.

Made by `dcp`. The saver asks `__create_write_items__` for the parts and `__get_tensor_shard__` for the values of one; the loader
asks `__create_chunk_list__`, and copies into what `__get_tensor_shard__` returns then, which writes through to the tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .shard_parts import ShardPart


class ShardRange(Protocol):
    """This rank's shard, by the numbers of elements."""

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return the elements [start, end), flat in host memory of their own."""

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace elements from number `start` on."""


class DcpTensor(torch.Tensor):
    """A tensor without values of its own.

    `before_writing` is called before each write; `saves` says whether this rank saves its parts.
    """

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> DcpTensor:
        made: DcpTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
        return made

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        parts: Sequence[ShardPart],
        values: ShardRange,
        before_writing: Callable[[], object],
        saves: bool = True,
    ) -> None:
        self._parts = {part.rectangle.offsets: part for part in parts}
        self._range, self._before_writing, self._saves = values, before_writing, saves
        self._loads = False

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(
            f"{func} of a tensor from zinf_compile.dcp_state_dict, which only dcp.save and dcp.load take. In the place of "
            "dcp.async_save, which copies all of them first, zinf_compile.save(folder, model, optimizer) saves in the background"
        )

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape),
            )
            for number, chunk in enumerate(self._chunks() if self._saves else [])
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self._loads = True
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None, "parts are named by their offsets"
        part = self._parts[tuple(index.offset)]
        if self._loads:
            return _Window(part, self, tuple(0 for _ in part.rectangle.sizes), part.rectangle.sizes)
        flat = self._range.read(part.start, part.start + part.rectangle.numel)
        return part.rearranged(flat).view(part.rectangle.sizes)

    def keep(self, part: ShardPart, offsets: Sequence[int], values: torch.Tensor) -> None:
        """Replace elements of a part, `values` at `offsets` in it."""
        self._before_writing()
        whole = part.rectangle.numel
        if values.numel() == whole:
            box = values.contiguous().view(part.rectangle.sizes)
        else:
            box = part.rearranged(self._range.read(part.start, part.start + whole)).view(part.rectangle.sizes).clone()
            box[tuple(slice(o, o + size) for o, size in zip(offsets, values.shape, strict=True))] = values
        flat = box if part.order is None else box.permute(part.order)
        self._range.write(part.start, flat.reshape(-1))

    def _chunks(self) -> list[ChunkStorageMetadata]:
        rectangles = [part.rectangle for part in self._parts.values()]
        return [ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.sizes)) for r in rectangles]


class _Window(torch.Tensor):
    """A rectangle of a part, into which a loader copies."""

    @staticmethod
    def __new__(cls, part: ShardPart, owner: DcpTensor, offsets: Sequence[int], sizes: Sequence[int]) -> _Window:
        made: _Window = torch.Tensor._make_wrapper_subclass(cls, tuple(sizes), dtype=owner.dtype, device=torch.device("cpu"))
        return made

    def __init__(self, part: ShardPart, owner: DcpTensor, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        self._part, self._owner, self._offsets = part, owner, tuple(offsets)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        window = args[0]
        if func is torch.ops.aten.detach.default:
            return window
        if func is torch.ops.aten.slice.Tensor:
            dim, start, end = list(args[1:4]) + [0, None, None][len(args) - 1 :]
            return window._narrowed(dim, start or 0, end)
        if func is torch.ops.aten.copy_.default:
            window._owner.keep(window._part, window._offsets, args[1].detach().to(window.dtype))
            return window
        raise TypeError(f"{func} of a part of a tensor that dcp.load fills; accepted: copy_")

    def _narrowed(self, dim: int, start: int, end: int | None) -> _Window:
        offsets, sizes = list(self._offsets), list(self.shape)
        stop = sizes[dim] if end is None else min(end, sizes[dim])
        offsets[dim], sizes[dim] = offsets[dim] + start, stop - start
        return _Window(self._part, self._owner, offsets, sizes)
