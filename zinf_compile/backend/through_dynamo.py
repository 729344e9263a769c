"""Errors of this package as Dynamo raises them to the user: as they are, without its frames."""

from __future__ import annotations

from typing import Any

from zinf_compile._torch import ShortenTraceback, dynamo_is_verbose

_HOW_TO_REPORT = "Set TORCHDYNAMO_VERBOSE=1"
"""The beginning of what Dynamo adds to the text of an error: how to report it to PyTorch."""
_PACKAGE = __name__.partition(".")[0]


def raise_through_dynamo(error: Exception) -> Exception:
    """Return `error` as an instance of its own class that Dynamo raises to the user as it is, not as BackendCompilerFailed."""
    kind, reduced = type(error), error.__reduce__()
    methods = {
        "__init__": _init_through,
        "__reduce__": lambda self: reduced,
        "__str__": lambda self: without_how_to_report(kind.__str__(self)),
        "remove_dynamo_frames": _without_dynamo,
    }
    through = type(kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__, **methods})
    args = error.args
    if isinstance(error, OSError) and error.filename is not None:  # missing in its `args`
        args = (*args, error.filename, None, error.filename2)
    passed: Exception = through(*args)
    passed.__dict__.update(error.__dict__)  # notes and other attributes
    return passed


def without_how_to_report(text: str) -> str:
    """Return an error's text without what Dynamo adds to it."""
    return text.partition(_HOW_TO_REPORT)[0].rstrip("\n")


def _init_through(self: Any, *args: object) -> None:
    (OSError if isinstance(self, OSError) else Exception).__init__(self, *args)
    self.first_useful_frame = None


def _without_dynamo(self: Exception) -> Exception:
    """Return the error as the backend raised it, from the first frame of this package on."""
    trace = self.__traceback__
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] != _PACKAGE:
        trace = trace.tb_next
    return self if trace is None or dynamo_is_verbose() else self.with_traceback(trace)
