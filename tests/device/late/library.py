"""The compiled device, loaded, and its functions by their C types."""

from __future__ import annotations

import atexit
import ctypes
import json
from typing import Any

import torch

from .build import build

PATH = build()
torch.ops.load_library(PATH)
C = ctypes.CDLL(str(PATH))
CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64)
WATCHER = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int64)

_TEXT, _NUMBER, _SIZE, _ADDRESS, _FLAG, _REAL = (
    ctypes.c_char_p,
    ctypes.c_int64,
    ctypes.c_size_t,
    ctypes.c_uint64,
    ctypes.c_bool,
    ctypes.c_double,
)
for _name, _result, *_arguments in (
    ("late_start", None),
    ("late_stop", None),
    ("late_set_delays", None, _ADDRESS, _REAL, _REAL, _FLAG),
    ("late_set_durations", None, _SIZE, ctypes.POINTER(_TEXT), ctypes.POINTER(_REAL), _REAL),
    ("late_set_lazy", None, _FLAG),
    ("late_set_detection", None, _FLAG),
    ("late_forbid_waits", None, _FLAG),
    ("late_set_capacity", None, _SIZE),
    ("late_set_pinned_limit", None, _SIZE),
    ("late_pinned_bytes", _SIZE),
    ("late_events", _NUMBER),
    ("late_register_host", _FLAG, _ADDRESS, _SIZE),
    ("late_unregister_host", _FLAG, _ADDRESS),
    ("late_set_fault_output", None, ctypes.c_int),
    ("late_watch_memory", None, WATCHER),
    ("late_reset_peak", None),
    ("late_count", None, _TEXT),
    ("late_defect", None, _TEXT, _TEXT),
    ("late_clear", None),
    ("late_report", ctypes.c_void_p),
    ("late_log", ctypes.c_void_p, _NUMBER),
    ("late_streams", _NUMBER),
    ("late_free_text", None, ctypes.c_void_p),
    ("late_hold", _NUMBER, _NUMBER),
    ("late_release", None, _NUMBER),
    ("late_drive_begins", _NUMBER, _TEXT, _ADDRESS, _ADDRESS, _FLAG),
    ("late_drive_ended", None, _NUMBER),
    ("late_fail", None, _TEXT),
    ("late_call", None, _NUMBER, _TEXT, CALL, _NUMBER, ctypes.POINTER(ctypes.c_uint64), _SIZE),
):
    getattr(C, _name).restype = _result
    getattr(C, _name).argtypes = _arguments

C.late_start()
atexit.register(C.late_stop)


def parsed(text: int) -> Any:
    """Return what a function of the library wrote as JSON, and free the text."""
    try:
        return json.loads(ctypes.string_at(text))
    finally:
        C.late_free_text(text)
