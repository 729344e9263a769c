"""Memory for a few chunks at a time, each a row of columns: a parameter's values, its gradients, its states."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import torch

from zinf_compile.ir.chunk_columns import Column, buffer_bytes
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.sizes import CHUNK_BUFFERS, PAGE, Sides, round_up
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.device.link import DeviceLink
from zinf_compile.runtime.lanes.lanes import Pending, wait_for_all
from zinf_compile.runtime.lanes.stream_lane import on_stream
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer

from .move import StagingBuffers


class ChunkBuffer:
    """Memory for one chunk."""

    def __init__(self, host: torch.Tensor | None, device: torch.Tensor | None, *, moves: bool = True) -> None:
        self._host, self._device = host, device
        self.moves = moves
        """Whether some of the chunk lives elsewhere, and comes to this memory for its update."""
        self.chunk: int | None = None
        """The chunk whose states it holds, or is being given."""
        self.filled = False
        """Parameters and gradients were brought for the step under way."""
        self.held = False
        """A step is updating it."""
        self.under_way: list[Pending] = []
        self._leaving: Pending | None = None
        """The last copy to host memory that a device's stream, but not the host, has waited for."""
        self.brought: dict[int, dict[str, torch.Tensor]] = {}
        """Where each of them is: its columns by name, by the number of its piece in the chunk."""

    @classmethod
    def in_place(cls) -> ChunkBuffer:
        """Return a buffer without memory, for a chunk that is updated where it lives."""
        return cls(None, None, moves=False)

    def staging(self, columns: Mapping[str, Column], numel: int) -> dict[str, StagingBuffers]:
        """Lay the columns of a chunk out, each from a page."""
        if not self.moves:
            return dict.fromkeys(columns, StagingBuffers(None, None))
        ends = {Tier.HOST: 0, Tier.DEVICE: 0}
        staging: dict[str, StagingBuffers] = {}
        for name, column in columns.items():
            size = format_of(column.dtype).bytes(numel)
            sides: dict[Tier, torch.Tensor | None] = {Tier.HOST: None, Tier.DEVICE: None}
            for side, memory, needed in ((Tier.HOST, self._host, column.host), (Tier.DEVICE, self._device, column.device)):
                if needed:
                    assert memory is not None
                    sides[side] = memory[ends[side] : ends[side] + size].view(column.dtype)
                    ends[side] += round_up(size, PAGE)
            staging[name] = StagingBuffers(sides[Tier.HOST], sides[Tier.DEVICE])
        return staging

    def drain(self) -> None:
        """Wait until nothing moves to or from the buffer; where that failed, its content is invalid."""
        leaving = [] if self._leaving is None else [self._leaving]
        self._wait([transfer.wait for transfer in [*leaving, *self.under_way][::-1]])  # the last one's end is that of many
        self._leaving = None

    def reuse(self) -> None:
        """Let what is issued next come after what moves to or from the buffer; the host waits for drives only. As `drain`."""
        leaving = [transfer for transfer in self.under_way if on_stream(transfer) is not transfer]
        self._wait([on_stream(transfer).wait for transfer in self.under_way])
        self._leaving = leaving[-1] if leaving else self._leaving

    def _wait(self, waits: Sequence[Callable[[], None]]) -> None:
        try:
            wait_for_all(waits)
        except Exception:
            self.under_way, self.chunk, self.filled = [], None, False
            raise
        self.under_way = []  # not before: after an interrupt they move still


class ChunkBuffers:
    """Hands out buffers to chunks. The chunks used last keep theirs until it is needed."""

    def __init__(
        self, chunks: Sequence[tuple[Mapping[str, Column], int]], link: DeviceLink, *, pinned: bool, most: int = CHUNK_BUFFERS
    ) -> None:
        device, host = largest_buffer(chunks)
        count = min(most, len(chunks))
        self._buffers = [  # the one used last at the end
            ChunkBuffer(
                aligned_buffer(host, pinned=pinned) if host else None,
                link.device_buffer(device, torch.uint8, lasting=True) if device else None,
            )
            for _ in range(count)
        ]
        self.host_bytes, self.device_bytes = host * count, device * count

    def __len__(self) -> int:
        """Return how many chunks may be in memory at a time."""
        return len(self._buffers)

    def begin(self) -> None:
        """Begin a step: parameters and gradients of an earlier one are no longer valid."""
        for buffer in self._buffers:
            buffer.filled, buffer.held = False, False

    @property
    def held(self) -> bool:
        """Whether a step is updating one."""
        return any(buffer.held for buffer in self._buffers)

    def find(self, number: int) -> ChunkBuffer | None:
        """Return the buffer that holds a chunk."""
        return next((buffer for buffer in self._buffers if buffer.chunk == number), None)

    def buffer_for(self, number: int) -> tuple[ChunkBuffer, bool]:
        """Return a chunk's buffer, and whether it is a new one, in which nothing is defined.

        A new one is the chunk's once the caller, who started to fill it, says so in `ChunkBuffer.chunk`.
        """
        buffer, new = self.find(number), False
        if buffer is None:
            buffer, new = next((buffer for buffer in self._buffers if not buffer.held), self._buffers[0]), True
            buffer.reuse()
            buffer.chunk, buffer.filled = None, False
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        return buffer, new

    def drain(self, *, but: Container[int | None] = ()) -> None:
        """Wait until nothing moves, but for some chunks; then raise the first error."""
        wait_for_all(buffer.drain for buffer in reversed(self._buffers) if buffer.chunk not in but)


def largest_buffer(chunks: Sequence[tuple[Mapping[str, Column], int]]) -> Sides:
    """Return the bytes of one buffer for any of these chunks."""
    sizes = [buffer_bytes(columns.values(), numel) for columns, numel in chunks]
    return Sides(max((size.device for size in sizes), default=0), max((size.host for size in sizes), default=0))
