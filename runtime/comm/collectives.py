"""Collectives: shards to full units and gradients to shards, several units at once, straight into the buffers of compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from zinf_compile.runtime.comm.shard_ranges import shard_numel, shard_range


class Collectives(Protocol):
    """Collectives that a lane performs. Flat tensors; shards are padded, full units are not."""

    def full_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty flat buffer of `numel` elements that `all_gather` can fill."""

    def padded_numel(self, numel: int) -> int:
        """Return the elements of memory that such a buffer takes."""

    def all_gather(self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor]) -> None:
        """Fill each full unit from all ranks' shards, cast before they travel where the full unit is of another type."""

    def reduce_scatter(self, grads: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """Fill each shard with the mean over the ranks of its part of the full gradients."""

    def scatter(self, full: torch.Tensor | None, shard: torch.Tensor, numel: int) -> None:
        """Fill each rank's shard from rank 0's full unit (`full` is read on rank 0 only)."""

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None) -> None:
        """Fill rank 0's full unit from all ranks' shards (`full` is written on rank 0 only)."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill the tensor with rank 0's values."""

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Give each rank what is `sent` for it; both are by rank, this one included, and both sides know all sizes."""


class PeerToPeer:
    """Sends and receives between all pairs: on gloo several times faster than its own collectives.

    Sums are taken in rank order on the rank that keeps the result, so they don't depend on how transfers are grouped.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self._size = group.size()
        self._peers = [(self._rank + step) % self._size for step in range(1, self._size)]

    def full_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return exactly the unit's elements: padding never travels."""
        return torch.empty(numel, dtype=dtype, device=device)

    def padded_numel(self, numel: int) -> int:
        """See `Collectives.padded_numel`."""
        return numel

    def all_gather(self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor]) -> None:
        """See `Collectives.all_gather`."""
        works = []
        for peer in self._peers:
            for tag, full in enumerate(fulls):
                works.append(self._receive(full[slice(*self._range(full, peer))], peer, tag))
        for tag, (shard, full) in enumerate(zip(shards, fulls, strict=True)):
            start, end = self._range(full, self._rank)
            own, sent = full[start:end], shard[: end - start]
            narrows = full.dtype != shard.dtype
            if narrows:
                sent = own.copy_(sent)  # cast where it belongs, and sent from there
            for peer in self._peers:
                works.append(self._send(sent, peer, tag))
            if not narrows:
                own.copy_(sent)
        _finish(works)

    def reduce_scatter(self, grads: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """See `Collectives.reduce_scatter`."""
        works = []
        others: list[list[torch.Tensor]] = []
        for tag, (grad, shard) in enumerate(zip(grads, shards, strict=True)):
            start, end = self._range(grad, self._rank)
            first, *later = sorted(self._peers)
            received = {first: shard[: end - start], **{peer: grad.new_empty(end - start) for peer in later}}
            works += [self._receive(part, peer, tag) for peer, part in received.items()]
            by_rank = {**received, self._rank: grad[start:end]}
            others.append([by_rank[rank] for rank in range(self._size) if rank != first])
        for tag, grad in enumerate(grads):
            works += [self._send(grad[slice(*self._range(grad, peer))], peer, tag) for peer in self._peers]
        _finish(works)
        for shard, parts in zip(shards, others, strict=True):
            valid = shard[: parts[0].numel()]  # holds rank 0's part, or on rank 0 rank 1's: a sum of two has no order
            for part in parts:
                valid.add_(part)
            valid.div_(self._size)
            shard[valid.numel() :].zero_()

    def scatter(self, full: torch.Tensor | None, shard: torch.Tensor, numel: int) -> None:
        """See `Collectives.scatter`."""
        start, end = shard_range(numel, self._size, self._rank)
        shard[end - start :].zero_()
        if self._rank != 0:
            _finish([self._receive(shard[: end - start], 0, 0)])
            return
        assert full is not None
        works = [self._send(full[slice(*shard_range(numel, self._size, peer))], peer, 0) for peer in self._peers]
        shard[: end - start].copy_(full[start:end])
        _finish(works)

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None) -> None:
        """See `Collectives.gather`; the others send their padding too, which rank 0 leaves out."""
        if full is None:
            _finish([self._send(shard, 0, 0)])
            return
        parts = {peer: torch.empty_like(shard) for peer in self._peers}
        _finish([self._receive(part, peer, 0) for peer, part in parts.items()])
        for rank, part in {**parts, self._rank: shard}.items():
            start, end = self._range(full, rank)
            full[start:end].copy_(part[: end - start])

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `Collectives.broadcast`."""
        if self._rank == 0:
            source = tensor.contiguous()
            _finish([self._send(source.view(-1), peer, 0) for peer in self._peers])
            return
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        _finish([self._receive(target.view(-1), 0, 0)])
        tensor.copy_(target)

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """See `Collectives.exchange`."""
        works = [self._receive(received[peer], peer, 0) for peer in self._peers]
        works += [self._send(sent[peer], peer, 0) for peer in self._peers]
        received[self._rank].copy_(sent[self._rank])
        _finish(works)

    def _range(self, full: torch.Tensor, rank: int) -> tuple[int, int]:
        return shard_range(full.numel(), self._size, rank)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work | None:
        return dist.isend(tensor, group=self._group, group_dst=peer, tag=tag) if tensor.numel() else None

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work | None:
        return dist.irecv(tensor, group=self._group, group_src=peer, tag=tag) if tensor.numel() else None


class DeviceCollectives:
    """The backend's own collectives, several units in one launch: for NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = group.size()
        self._rank = group.rank()

    def full_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the first `numel` elements of a buffer that has room for the padding."""
        return torch.empty(self.padded_numel(numel), dtype=dtype, device=device)[:numel]

    def padded_numel(self, numel: int) -> int:
        """See `Collectives.padded_numel`."""
        return self._size * shard_numel(numel, self._size)

    def all_gather(self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor]) -> None:
        """See `Collectives.all_gather`; `fulls` come from `full_buffer`."""
        padded = [full.as_strided((shard.numel() * self._size,), (1,)) for shard, full in zip(shards, fulls, strict=True)]
        sent = [
            shard if whole.dtype == shard.dtype else whole.narrow(0, self._rank * shard.numel(), shard.numel()).copy_(shard)
            for shard, whole in zip(shards, padded, strict=True)
        ]  # a shard of another type is cast where it belongs, and gathered in place
        self._group.allgather_into_tensor_coalesced(padded, sent).wait()

    def reduce_scatter(self, grads: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """See `Collectives.reduce_scatter`; the order of the sum is NCCL's."""
        padded = [self._padded(grad, shard) for grad, shard in zip(grads, shards, strict=True)]
        self._group.reduce_scatter_tensor_coalesced(list(shards), padded).wait()
        for shard in shards:
            shard.div_(self._size)

    def scatter(self, full: torch.Tensor | None, shard: torch.Tensor, numel: int) -> None:
        """See `Collectives.scatter`."""
        parts = None
        if self._rank == 0:
            assert full is not None
            padded = self._padded(full, shard)
            parts = list(padded.split(shard.numel())) if shard.numel() else [shard] * self._size
        dist.scatter(shard, parts, group=self._group, group_src=0)

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None) -> None:
        """See `Collectives.gather`."""
        parts = [torch.empty_like(shard) for _ in range(self._size)] if full is not None else None
        if shard.numel():
            dist.gather(shard, parts, group=self._group, group_dst=0)
        if full is not None and parts:
            full.copy_(torch.cat(parts)[: full.numel()])

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `Collectives.broadcast`."""
        whole = tensor.contiguous()
        dist.broadcast(whole, group=self._group, group_src=0)
        if whole is not tensor:
            tensor.copy_(whole)

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """See `Collectives.exchange`."""
        dist.all_to_all(list(received), list(sent), group=self._group)

    def _padded(self, full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        missing = shard.numel() * self._size - full.numel()
        return torch.nn.functional.pad(full, (0, missing)) if missing else full


class SingleRank:
    """World size 1: a shard is the whole, nothing travels."""

    def full_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty flat buffer."""
        return torch.empty(numel, dtype=dtype, device=device)

    def padded_numel(self, numel: int) -> int:
        """See `Collectives.padded_numel`."""
        return numel

    def all_gather(self, shards: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor]) -> None:
        """Copy."""
        for shard, full in zip(shards, fulls, strict=True):
            full.copy_(shard)

    def reduce_scatter(self, grads: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
        """Copy."""
        for grad, shard in zip(grads, shards, strict=True):
            shard.copy_(grad)

    def scatter(self, full: torch.Tensor | None, shard: torch.Tensor, numel: int) -> None:
        """Copy."""
        assert full is not None
        shard.copy_(full)

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None) -> None:
        """Copy."""
        assert full is not None
        full.copy_(shard)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Do nothing."""

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Copy."""
        for value, place in zip(sent, received, strict=True):
            place.copy_(value)


def _finish(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
