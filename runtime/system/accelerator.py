"""The accelerator of this process, whichever `torch.accelerator` knows: its memory, its names, its current stream, methods that
move tensors.

What only CUDA and ROCm have is in `page_locked`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_CONVERSIONS = ("to", "cpu", "float", "half", "double", "bfloat16")


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Return what PyTorch could take of a device's memory now, what its allocator keeps unused included, and all there is."""
    free, total = torch.accelerator.get_memory_info(device)
    unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return free + unused, total


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of a device's memory that tensors of this process take, as its allocator rounds them."""
    return torch.accelerator.memory_allocated(device)


def numbered(device: torch.device) -> torch.device:
    """Return a device by its number, as tensors name it: of an accelerator without one, this thread's current one."""
    found = torch.accelerator.current_accelerator()
    if device.index is not None or found is None or device.type != found.type:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return this thread's current stream of an accelerator, an object of the caller's own to be entered; None on the CPU."""
    return None if device.type == "cpu" else accelerator_stream(device)


def accelerator_stream(device: torch.device) -> torch.Stream:
    """Return the same of what is no CPU. PyTorch finds it by the device's number in a fraction of the time."""
    return torch.accelerator.current_stream(device if device.index is None else device.index)


def is_initialized() -> bool:
    """Return whether this process uses an accelerator already; asking doesn't begin to."""
    found = torch.accelerator.current_accelerator()
    return found is not None and bool(getattr(torch.get_device_module(found), "is_initialized", lambda: True)())


def on_this_device(run: Callable[[], None]) -> Callable[[], None]:
    """Return `run` for another thread, where it begins with the accelerator that is this thread's current one now.

    A new thread's is number 0 on every rank, and what waits for another device's work there takes memory of that one, too.
    """
    if not is_initialized():
        return run
    index = torch.accelerator.current_device_index()

    def runs() -> None:
        torch.accelerator.set_device_index(index)
        run()

    return runs


def device_names() -> list[str]:
    """Return the names of all devices, in the order of their numbers."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    name_of = getattr(torch.get_device_module(found), "get_device_name", lambda number: f"{found.type}:{number}")
    return [str(name_of(number)) for number in range(torch.accelerator.device_count())]


def moving_methods() -> frozenset[str]:
    """Return the names of the methods that copy a tensor to an accelerator: `cuda`, and this process's own, such as `xpu`."""
    found = torch.accelerator.current_accelerator()
    return frozenset({"cuda"} if found is None else {"cuda", found.type})


def converting_methods() -> frozenset[str]:
    """Return the names of the methods that return the tensor itself where it has that type and is on that device."""
    return moving_methods().union(_CONVERSIONS)
