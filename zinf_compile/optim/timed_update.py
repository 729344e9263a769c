"""Times of updates, for whoever records a step."""

from __future__ import annotations

import contextlib

from zinf_compile.runtime.context import Context
from zinf_compile.runtime.lanes.step_recorder import UPDATE

_NOTHING = contextlib.nullcontext()


def timed_update(context: Context, name: str, *, on_device: bool) -> contextlib.AbstractContextManager[object]:
    """Return a context whose time is noted on the lane of updates, where the step is recorded."""
    recorder = context.lanes.meter.recorder
    return _NOTHING if recorder is None else recorder.timed(UPDATE, f"update {name}", on_stream=on_device)
