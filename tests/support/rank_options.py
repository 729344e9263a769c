"""Options that ranks give unlike each other: what each rank is told, and how soon."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from compute_models import MODELS

import zinf_compile
from zinf_compile.errors import ZinfError
from zinf_compile.ir.device_rates import DeviceRates
from zinf_compile.plan.profile import find_profile, shipped
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

WORKS = "64MiB"


def start(options: dict[str, Any]) -> torch.nn.Module:
    """Take a step of a new model, and return that."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = MODELS["wide"][0]()
    call = torch.compile(model, backend="zero_infinity", options={"compute": "fx", "timeout_s": 60, **options})
    call(*MODELS["wide"][1]()).backward()
    torch.optim.AdamW(model.parameters()).step()
    return model


def told(options: dict[str, Any]) -> tuple[str, str, float]:
    """Return the class of the error that options end with, its text, and the seconds until then."""
    began = time.monotonic()
    with pytest.raises(ZinfError) as caught:
        start(options)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began


def other_caps(rank: int, size: int) -> list[tuple[str, str, float]]:
    """Give each rank a `device_memory` of its own: from the start, and once all have trained with the same one."""
    zinf_compile.reset()
    own = {"device_memory": f"{64 + rank}MiB"}
    found = [told(own)]
    zinf_compile.reset()
    start({"device_memory": WORKS})
    found.append(told({"device_memory": WORKS} if rank == 0 else own))
    zinf_compile.reset()
    start({"device_memory": WORKS})
    return found


def other_machines(rank: int, size: int, folder: str) -> tuple[str, str, float]:
    """Give each rank a file of the same name, with another rate on the last one."""
    mine = Path(folder) / str(rank)
    mine.mkdir()
    text = find_profile(shipped()[0]).to_json()
    if rank == size - 1:
        text, count = re.subn(r'("device_memory_bytes": )(\d+)', r"\g<1>12345678", text)
        assert count == 1
    before = os.getcwd()
    os.chdir(mine)
    try:
        Path("machine.json").write_text(text)
        zinf_compile.reset()
        return told({"machine": "machine.json", "device_memory": WORKS})
    finally:
        os.chdir(before)


def files_of_each_rank(rank: int, size: int, folder: str) -> float:
    """Train with files of other names and the same content; return the norm of a gradient."""
    path = Path(folder) / f"machine-{rank}.json"
    path.write_text(find_profile(shipped()[0]).to_json())
    zinf_compile.reset()
    model = start({"machine": str(path), "device_memory": WORKS})
    return float(next(iter(model.parameters())).grad.full_tensor().norm())  # type: ignore[union-attr, operator]


def device_of_each_rank(rank: int, size: int, options: dict[str, Any]) -> tuple[DeviceRates | None, dict[str, int]]:
    """Train beside a device whose link is slower on later ranks; return the rates that ranks go by, and bytes saved by choice."""
    zinf_compile.reset()
    with simulating(SimulatedDevice(bytes_per_s=1e8 / 10 ** (rank + 1))):
        model = start(options)
        parameter: Any = next(iter(model.parameters()))
        return parameter._zinf_unit.context.rates, zinf_compile.stats(model)["activations"]
