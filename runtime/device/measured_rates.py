"""Measures an accelerator's products and its copies to host memory and from there: milliseconds, and a few MiB."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from zinf_compile.ir.device_rates import TYPES, DeviceRates
from zinf_compile.runtime.system.process_wide import process_wide

MEASURED = ("cuda", "xpu")
"""Types of devices, as PyTorch names them, that are measured."""
COPIED = 16 << 20
"""Bytes of a copy."""
WIDTH = 2048
"""Rows and columns of a product's factors."""
RUNS = 4
"""Of each; the fastest one counts."""
REACHED = 0.75
"""Share of a large product's rate that those of a step reach on average."""

_known: dict[torch.device, DeviceRates] = process_wide({})


def rates_of(device: torch.device) -> DeviceRates:
    """Return the rates of a device, measured at the first call; nothing of what is no accelerator, or has no memory left."""
    if device.type not in MEASURED:
        return DeviceRates()
    if device not in _known:
        try:
            _known[device] = measure_rates(device)
        except torch.OutOfMemoryError:
            return DeviceRates()
    return _known[device]


def measure_rates(device: torch.device) -> DeviceRates:
    """Measure the rates of a device now. Raises `torch.OutOfMemoryError` where it has no memory for that."""

    def wait() -> None:
        torch.accelerator.synchronize(device)

    with torch.no_grad(), torch.autocast(device.type, enabled=False):  # the caller may be about to compute otherwise
        to_device, to_host = _copy_rates(device, wait)
        rates = {name: _product_rate(device, getattr(torch, name), wait) for name in TYPES}
    flops = {name: rate for name, rate in rates.items() if rate}
    return DeviceRates(to_device=to_device, to_host=to_host, flops=flops)


def _copy_rates(device: torch.device, wait: Callable[[], None]) -> tuple[float, float]:
    host = torch.ones(COPIED, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    to_device = COPIED / fastest(lambda: there.copy_(host, non_blocking=True), wait)
    to_host = COPIED / fastest(lambda: host.copy_(there, non_blocking=True), wait)
    return to_device, to_host


def _product_rate(device: torch.device, dtype: torch.dtype, wait: Callable[[], None]) -> float:
    """Return the operations per second of products in a type; 0 where the device has none in it."""
    # of random numbers: products of zeros draw less power, and are faster
    one, other = (torch.rand(WIDTH, WIDTH, device=device, generator=_generator(device)).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    try:
        return REACHED * 2 * WIDTH**3 / fastest(lambda: torch.mm(one, other, out=out), wait)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return 0.0


def _generator(device: torch.device) -> torch.Generator:
    """Return a generator of its own: the user's numbers stay as they are."""
    return torch.Generator(device).manual_seed(0)


def fastest(run: Callable[[], object], wait: Callable[[], None], *, runs: int = RUNS, seconds: float = 0.0) -> float:
    """Return the seconds of the fastest of so many runs, or of more as far as they fit in `seconds`; one before doesn't count.

    `wait` returns when one is over.
    """
    run()
    wait()
    found, ends = list[float](), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run()
        wait()
        found.append((now := time.perf_counter()) - start)
        if len(found) >= runs and now >= ends:
            return max(min(found), 1e-9)
