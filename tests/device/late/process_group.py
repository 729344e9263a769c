"""Collectives of the device, over gloo, in the order of a stream of their own, as NCCL's are.

`Work.wait` orders streams; the host goes on.

    torch.distributed.init_process_group("late", rank=..., world_size=..., store=...)

registers itself with PyTorch where `late.process_group` is imported. Tensors of the host go through a second gloo group at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from . import controls

_DEVICE = torch.device("late", 0)


class LateWork(dist.Work):
    """A collective that was issued to the group's stream. It holds its tensors until it was waited for, as NCCL's.

    That it is over by then frees nothing: no stream is ordered after it yet.
    """

    def __init__(self, done: torch.Event, results: list[torch.Tensor], stream: torch.Stream, held: list[torch.Tensor]) -> None:
        super().__init__()
        self._done = done
        self._results = results
        self._stream = stream
        self._held = held

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream wait for it. The host goes on."""
        torch.accelerator.current_stream().wait_event(self._done)
        self._held.clear()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._done.query())

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[_DEVICE])
        with self._stream:
            future.set_result(self._results)
        return future


class LateGroup(dist.ProcessGroup):
    """One process group: a stream, one gloo group for what runs on it, another one for tensors of the host."""

    takes_host = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._device_gloo = dist.ProcessGroupGloo(dist.PrefixStore("late device", store), rank, size, timeout)
        self._host_gloo = dist.ProcessGroupGloo(dist.PrefixStore("late host", store), rank, size, timeout)
        self._stream = torch.Stream(device=_DEVICE)
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._host_gloo)
        self._register_backend(torch.device("late"), dist.ProcessGroup.BackendType.CUSTOM, self._device_gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    @property
    def stream(self) -> torch.Stream:
        """The stream that collectives run on."""
        return self._stream

    def getBackendName(self) -> str:
        return "late"

    def _run(self, name: str, call: Callable[[Any, Any, Any], Any], into: Sequence[Any], of: Sequence[Any]) -> dist.Work:
        """Issue `call(gloo, into, of)`, of tensors, or lists of them; it is given what gloo can take of those of the device.

        The work on the stream owns no memory, as a kernel doesn't: that may be freed in the order of streams while it is to run.
        """
        written, read = _flat(into), _flat(of)
        if not any(tensor.device.type == "late" for tensor in [*written, *read]):
            if not self.takes_host:
                raise ValueError(f"{name}: No backend type associated with device type cpu")
            return call(self._host_gloo, into, of)
        for tensor in [*written, *read]:
            if tensor.device.type != "late" or not tensor.is_contiguous():
                raise ValueError(f"{name}: tensors must be contiguous and all on device late, found one on {tensor.device}")
        held = [*written, *read]
        there, here = _each(torch.ops.late.borrowed, into), _each(torch.ops.late.borrowed, of)

        def collective() -> None:
            view = torch.ops.late.host_view
            _finish(call(self._device_gloo, _each(view, there), _each(view, here)))

        issued = torch.accelerator.current_stream().record_event()
        with self._stream:
            self._stream.wait_event(issued)
            controls.run_on_stream(collective, name, reads=read, writes=written)
            done = self._stream.record_event()
        return LateWork(done, written, self._stream, held)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        opts = opts or c10d.AllreduceOptions()
        return self._run("all_reduce", lambda gloo, into, of: gloo.allreduce(into, opts), tensors, tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        one = c10d.AllreduceOptions()
        if opts is not None:
            one.reduceOp = opts.reduceOp
        return self._run("all_reduce", lambda gloo, into, of: [gloo.allreduce([t], one) for t in into], tensors, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        written, read = (tensors, []) if opts.rootRank != self.rank() else ([], tensors)
        return self._run("broadcast", lambda gloo, into, of: gloo.broadcast([*into, *of], opts), written, read)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        return self._run("reduce", lambda gloo, into, of: gloo.reduce(into, opts), tensors, tensors)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        return self._run(
            "all_gather_into_tensor", lambda gloo, into, of: gloo._allgather_base(*into, *of, opts), [output], [input]
        )

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        return self._run("all_gather", lambda gloo, into, of: gloo.allgather(into, of, opts), outputs, inputs)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        one = c10d.AllgatherOptions()
        return self._run(
            "all_gather_into_tensor",
            lambda gloo, into, of: [gloo._allgather_base(o, i, one) for o, i in zip(into, of, strict=True)],
            outputs,
            inputs,
        )

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        return self._run(
            "reduce_scatter_tensor", lambda gloo, into, of: gloo._reduce_scatter_base(*into, *of, opts), [output], [input]
        )

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        return self._run("reduce_scatter", lambda gloo, into, of: gloo.reduce_scatter(into, of, opts), outputs, inputs)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        return self._run(
            "reduce_scatter_tensor",
            lambda gloo, into, of: [gloo._reduce_scatter_base(o, i, opts) for o, i in zip(into, of, strict=True)],
            outputs,
            inputs,
        )

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        opts = opts or c10d.AllToAllOptions()
        return self._run(
            "all_to_all_single",
            lambda gloo, into, of: gloo.alltoall_base(*into, *of, output_splits, input_splits, opts),
            [output],
            [input],
        )

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        def exchange(gloo: Any, received: list[torch.Tensor], sent: list[torch.Tensor]) -> Any:
            works = []
            for peer in range(self.size()):
                if peer == self.rank():
                    received[peer].copy_(sent[peer])
                elif sent[peer].numel():
                    works.append(gloo.send([sent[peer]], peer, 0))
            return [*works, *(gloo.recv([r], peer, 0) for peer, r in enumerate(received) if peer != self.rank() and r.numel())]

        return self._run("all_to_all", exchange, outputs, inputs)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> dist.Work:
        return self._run("gather", lambda gloo, into, of: gloo.gather(into, of, opts), outputs, inputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> dist.Work:
        return self._run("scatter", lambda gloo, into, of: gloo.scatter(into, of, opts), outputs, inputs)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        def sent(gloo: Any, into: Any, of: list[torch.Tensor]) -> Any:
            if gloo is self._host_gloo:
                return gloo.send(of, peer, tag)
            copy = of[0].clone()  # ranks that send to each other would wait forever, each for the other to receive
            self._sent = [(work, held) for work, held in self._sent if not work.is_completed()]
            self._sent.append((gloo.send([copy], peer, tag), copy))
            return []

        return self._run("send", sent, [], tensors)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        return self._run("recv", lambda gloo, into, of: gloo.recv(into, peer, tag), tensors, [])

    # The same, as PyTorch calls them from 2.13 on.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._host_gloo.barrier(opts or c10d.BarrierOptions())


@contextmanager
def host_refused() -> Iterator[None]:
    """Let groups of the device refuse tensors of the host, as NCCL's do."""
    LateGroup.takes_host = False
    try:
        yield
    finally:
        LateGroup.takes_host = True


def _flat(tensors: Sequence[Any]) -> list[torch.Tensor]:
    return [tensor for each in tensors for tensor in ([each] if isinstance(each, torch.Tensor) else each)]


def _each(change: Callable[[torch.Tensor], torch.Tensor], tensors: Sequence[Any]) -> list[Any]:
    return [change(each) if isinstance(each, torch.Tensor) else [change(tensor) for tensor in each] for each in tensors]


def _finish(works: Any) -> None:
    for work in works if isinstance(works, list) else [works]:
        work.wait()


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LateGroup:
    return LateGroup(store, rank, size, timeout)


dist.Backend.register_backend("late", _create, devices=["late", "cpu"])
