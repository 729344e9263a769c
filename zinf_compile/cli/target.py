"""Finds the model that a command line names: a built-in one, or what a function of the user's returns."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from .dump_error import DumpError, raised_by
from .models import TARGETS

NAMED = "MODULE:FUNCTION or FILE.py:FUNCTION"
"""How a target of the user's is named."""

Target = Callable[[], tuple[nn.Module, Any]]


def load_target(spec: str) -> Target:
    """Find a built-in target by name, `MODULE:FUNCTION` or `FILE.py:FUNCTION`; FUNCTION returns (model, example inputs).

    Raises `DumpError` for one that isn't there, or is no function that takes no arguments.
    """
    if spec in TARGETS:
        return TARGETS[spec]
    module_name, colon, function_name = spec.rpartition(":")
    if not colon or not module_name or not function_name:
        accepted = f"{NAMED.replace(' or', ',')}, or one of {', '.join(TARGETS)}"
        raise DumpError(f"target {spec!r} is not known; accepted: {accepted}")
    with raised_by(f"target {spec!r}: importing {module_name}"):
        module = _of_file(module_name) if module_name.endswith(".py") else _of_name(module_name)
    if not hasattr(module, function_name):
        raise DumpError(f"target {spec!r}: {module_name} has no {function_name!r}")
    target = getattr(module, function_name)
    if not callable(target):
        raise DumpError(f"target {spec!r} is a {type(target).__name__}; accepted: a function that returns (model, inputs)")
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        raise DumpError(f"target {spec!r} takes arguments ({error}); accepted: a function that is called without any") from None
    except ValueError:  # of no known signature
        pass
    found: Target = target
    return found


def _of_name(name: str) -> ModuleType:
    if name.startswith("."):
        raise DumpError(f"{name!r} is no module's name; accepted: as in package.module:function, or file.py:function")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: the user's module may be in the current folder
    return importlib.import_module(name)


def _of_file(path: str) -> ModuleType:
    """Import a file, which finds its neighbours as a script does."""
    folder, name = os.path.split(path)
    stem = name.removesuffix(".py")
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None, "it is a Python file"
    assert spec.loader is not None, "which has a loader"
    sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(stem, module)  # which dataclasses look up by its name
    spec.loader.exec_module(module)
    return module
