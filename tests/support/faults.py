"""Make drives fail under a model whose states live there."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zinf_compile.optim.offloaded_states import OffloadedStates
from zinf_compile.optim.record import record_of
from zinf_compile.runtime.storage.engine import Engine
from zinf_compile.runtime.storage.extent_store import Store
from zinf_compile.sharded.parameter import ShardedParameter


def offloaded_of(optimizer: Optimizer) -> list[OffloadedStates]:
    """Return what steps an optimizer's parameters chunk by chunk."""
    return record_of(optimizer).offloaded or []


def store_of(kind: str, model: nn.Module, optimizer: Optimizer | None = None) -> Store:
    """Return what keeps "parameter", "gradient of" or, as "exp_avg of", the states."""
    parameter: Any = next(p for p in model.parameters() if isinstance(p, ShardedParameter) and p.requires_grad and p.dim())
    if kind == "parameter":
        store = parameter._zinf_unit.backing.shards.store
        for states in offloaded_of(optimizer) if optimizer else []:
            states.transfers.drain()
    elif kind == "gradient of":
        parameter.grad.offloaded.wait_written()
        store = parameter.grad.offloaded.backing.shards.store
    else:
        assert optimizer is not None
        (states,) = offloaded_of(optimizer)
        states.transfers.drain()
        store = states.transfers.store
    assert isinstance(store, Store)
    store._io.drain()  # type: ignore[union-attr]
    return store


def tamper(fd: int, data: bytes, offset: int) -> None:
    """Write to a store's file past the store; opened anew, since the descriptor may be one for direct I/O."""
    past = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        assert os.pwrite(past, data, offset) == len(data)
        os.fsync(past)
    finally:
        os.close(past)


def flip(store: Store, prefix: str) -> Callable[[], None]:
    """Flip a bit of the first block of the first extent whose name starts so; return what flips it back."""
    key = next(key for key in store.layout.extents if str(key).startswith(prefix))
    block = store.layout.find(key).blocks[0]

    def turn() -> None:
        fd = os.open(f"/proc/self/fd/{store.files[block.device].fd}", os.O_RDWR)
        try:
            (byte,) = os.pread(fd, 1, block.offset + 5)
            os.pwrite(fd, bytes([byte ^ 8]), block.offset + 5)
            os.fsync(fd)
        finally:
            os.close(fd)

    turn()
    return turn


class _Failed:
    """A request that ends as one does on a failing drive."""

    times = None

    def wait(self) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "nameless")

    def done(self) -> bool:
        return True


@contextlib.contextmanager
def failing(engine: Engine, way: str, number: int, error: type[BaseException] = OSError) -> Iterator[list[int]]:
    """Let the transfer of this number, counted from 0, end with EIO, or raise what a signal handler does in the main thread.

    Yields the numbers of those that began.
    """
    began: list[int] = []
    really = getattr(engine, way)

    def transfer(*args: Any, **kwargs: Any) -> Any:
        if error is not OSError and threading.current_thread() is not threading.main_thread():
            return really(*args, **kwargs)
        began.append(len(began))
        if began[-1] != number:
            return really(*args, **kwargs)
        if error is OSError:
            return _Failed()
        raise error("in the middle")

    setattr(engine, way, transfer)
    try:
        yield began
    finally:
        delattr(engine, way)


@contextlib.contextmanager
def interrupting(owner: Any, name: str, number: int) -> Iterator[list[int]]:
    """Let Ctrl-C be pressed as the main thread begins the call of this number, counted from 0, of a method that waits.

    Yields the numbers of the calls that it began. The signal is a real one.
    """
    began: list[int] = []
    really, own = getattr(owner, name), name in vars(owner)

    def wait(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            began.append(len(began))
            if began[-1] == number:
                signal.raise_signal(signal.SIGINT)
        return really(*args, **kwargs)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have another
    setattr(owner, name, wait)
    try:
        yield began
    finally:
        if own:
            setattr(owner, name, really)
        else:
            delattr(owner, name)
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Let Ctrl-C be pressed when the main thread has been in the block for so long."""
    main = threading.main_thread().ident
    assert main is not None
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, handler)


def named(error: BaseException) -> bool:
    """Say whether an error names what it is about, and where on which drive."""
    text = str(error)
    return any(f"{kind} " in text for kind in ("parameter", "gradient of", "exp_avg", "exp_avg_sq")) and "offset" in text
