"""Waiting for an event that was never recorded orders nothing, and PyTorch says nothing: here it is counted as a defect.

PyTorch's events return before they ask the device, so the methods themselves are wrapped.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from .library import C


def _wrap(kind: type, name: str, event_of: Callable[..., torch.Event | None]) -> None:
    methods = next(found for found in gc.get_referents(kind.__dict__) if isinstance(found, dict) and name in found)
    original = methods[name]

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        event = event_of(*args, **kwargs)
        if event is not None and event.device.type == "late" and event.event_id == 0:
            C.late_defect(b"waits for unrecorded events", f"{kind.__name__}.{name}".encode())
        return original(*args, **kwargs)

    methods[name] = checked
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


_wrap(torch.Event, "wait", lambda self, stream=None: self)
_wrap(torch.Event, "synchronize", lambda self: self)
_wrap(torch.Stream, "wait_event", lambda self, event: event)
