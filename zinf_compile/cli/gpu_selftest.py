"""`zinf doctor --gpu-selftest`: runs on this machine's accelerator what tests show on simulated ones, in two minutes.

Its report is one block of text, for an issue. The checks are in `selftest_training` and `selftest_transfers`.
"""

from __future__ import annotations

import collections
import importlib.metadata
import platform
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from zinf_compile.runtime.system.accelerator import device_names, free_and_total_bytes

from . import selftest_training as training
from . import selftest_transfers as transfers
from .selftest_check import Finding, NotHere, SelfTestError

TITLE = "zinf doctor --gpu-selftest"

_WIDTH = 110

Check = tuple[str, Callable[[torch.device], Finding]]


def accelerator() -> torch.device:
    """Return the accelerator that checks run on; raise `SelfTestError` where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        built = torch.accelerator.current_accelerator()
        why = "is built for none" if built is None else f"is built for {built.type} and finds no such device"
        raise SelfTestError(
            f"--gpu-selftest needs an accelerator, and there is none here: PyTorch {torch.__version__} {why} "
            "(torch.accelerator.is_available() is False). Run it where training will run; `zinf doctor` alone needs none"
        )
    return torch.device(found.type, torch.accelerator.current_device_index())


def checks(nvme: str | None) -> list[Check]:
    """Return what is checked, in order, by name."""
    return [
        ("placements, bit for bit", lambda device: training.placements(device, nvme)),
        ("accumulated and clipped gradients", training.gradients),
        ("compiled by Inductor", training.inductor),
        ("peak within the budget", training.peak),
        ("a second model beside ours", training.second_model),
        ("expandable_segments", training.expandable_segments),
        ("locked host memory", transfers.locked),
        ("copies at the link's speed", transfers.speed),
        ("copies beside compute", transfers.overlap),
    ]


def report(nvme: str | None = None, *, chosen: Sequence[Check] | None = None) -> tuple[str, bool]:
    """Run the checks; return the report, and whether none of them failed."""
    device, start = accelerator(), time.perf_counter()
    lines, counted = [], collections.Counter[str]()
    for name, check in checks(nvme) if chosen is None else chosen:
        try:
            found = check(device)
            verdict, text = ("ok  " if found.passed else "FAIL"), found.text
        except NotHere as error:
            verdict, text = "-   ", str(error)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            verdict, text = "FAIL", f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        counted[verdict] += 1
        lines.append(_wrapped(f"{verdict}  {name}: {' '.join(text.split())}"))
    took = time.perf_counter() - start
    end = f"{counted['ok  ']} passed, {counted['FAIL']} failed, {counted['-   ']} not for this device, in {took:.0f} s"
    return "\n".join([TITLE, *_versions(device), "", *lines, "", end]), not counted["FAIL"]


def _wrapped(line: str) -> str:
    return textwrap.fill(line, _WIDTH, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)


def _versions(device: torch.device) -> list[str]:
    runtime = next((f"{name} {v}" for name in ("cuda", "hip", "xpu") if (v := getattr(torch.version, name, None))), "")
    free, total = free_and_total_bytes(device)
    ours, name = importlib.metadata.version("zinf-compile"), device_names()[device.index or 0]
    return [
        f"zinf-compile {ours}, torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"{name} ({device}{', ' * bool(runtime)}{runtime}), {free >> 20:,} of {total >> 20:,} MiB free",
    ]
