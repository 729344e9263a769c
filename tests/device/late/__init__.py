"""`late`: a device for tests, on the CPU, that is never earlier than it has to be.

Memory that host code can't touch; streams that only events order, each work of them after a random delay; an allocator that
poisons what is freed; counters of what the host waits for; a detector of accesses that nothing orders, those of the host's own
operators to pinned memory among them. Import it before anything runs backward: PyTorch starts autograd's threads once, one for
each device that it knows then.

    with late.delays(0.002, seed=3):  # or late.lazily(): no stream runs before the host waits
        train(model.to("late"))
        torch.accelerator.synchronize()
    assert not late.defects()
    assert late.counters()["host waits"] <= 3

    build.py          compiles csrc/ once and keeps it
    library.py        the compiled functions
    torch_module.py   torch.late, what torch.get_device_module finds
    controls.py       what tests set and read: delays, held streams, counters, logs, the account of memory
    memory_watch.py   who has device memory when most of it is held
    checks.py         waiting for events that were never recorded, on PyTorch's own Event and Stream
    dynamo.py         torch.compile's view of the device
    gaps.py           what PyTorch gets wrong for devices outside of it
    process_group.py  collectives over gloo, in the order of a stream
    csrc/             the device: memory, order, streams, counters, pinned; PyTorch's side of it: guard, tensors, fallback,
                      operators, generator, settings, autocast, host; the functions of library.py: controls
"""

from __future__ import annotations

import torch

from . import library  # noqa: F401  first: it registers the device

torch.utils.rename_privateuse1_backend("late")

from . import torch_module  # noqa: E402

torch._register_device_module("late", torch_module)
torch.utils.generate_methods_for_privateuse1_backend()

from . import checks, dynamo, gaps  # noqa: E402, F401
from .controls import (  # noqa: E402
    Account,
    InUse,
    account,
    clear,
    counters,
    defects,
    delays,
    detection,
    drive_begins,
    drive_ended,
    durations,
    fault_output,
    held,
    in_use,
    lazily,
    log,
    logs,
    memory_limit,
    overlap,
    pinned_limit,
    reset_peak,
    run_on_stream,
    waits_by_thread,
    waits_forbidden,
)

__all__ = [
    "Account",
    "InUse",
    "account",
    "clear",
    "counters",
    "defects",
    "delays",
    "detection",
    "drive_begins",
    "drive_ended",
    "durations",
    "fault_output",
    "held",
    "in_use",
    "lazily",
    "log",
    "logs",
    "memory_limit",
    "overlap",
    "pinned_limit",
    "reset_peak",
    "run_on_stream",
    "waits_by_thread",
    "waits_forbidden",
]
