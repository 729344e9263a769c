"""`torch.late`, as `torch.cuda` is for CUDA: what PyTorch and programs look up by `torch.get_device_module("late")`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .library import C

_initialized = True  # torch.utils.checkpoint keeps no random states otherwise
Event = torch.Event
Stream = torch.Stream


def _is_in_bad_fork() -> bool:
    return False


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def _lazy_init() -> None:
    """Be there: without it PyTorch takes the device for one that was never used, and `synchronize` does nothing. [torch 2.11]"""


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    if torch.device("late", device).index if isinstance(device, int) else torch.device(device).index:
        raise RuntimeError(f"there is one device late, late:0; found {device}")


def get_device_name(device: Any = None) -> str:
    return "late"


@contextmanager
def device(device: Any) -> Iterator[None]:
    yield


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream()


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=0, device_type=int(torch._C._autograd.DeviceType.PrivateUse1))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """Return a context in which `stream` is the current one."""
    return stream


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize()


memory_allocated = torch.accelerator.memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_allocated = torch.accelerator.max_memory_allocated
max_memory_reserved = torch.accelerator.max_memory_reserved
memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
empty_cache = torch.accelerator.empty_cache


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info()


def _generator() -> torch.Generator:
    return torch.ops.late.default_generator()


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


manual_seed_all = manual_seed


def seed() -> None:
    _generator().seed()


def initial_seed() -> int:
    return _generator().initial_seed()


def get_rng_state(device: Any = "late") -> torch.Tensor:
    return _generator().get_state()


def set_rng_state(state: torch.Tensor, device: Any = "late") -> None:
    _generator().set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    set_rng_state(states[0])


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


def register_host_memory(address: int, length: int) -> bool:
    """Pin `length` bytes where they are, as `cudaHostRegister` does.

    False where some of them are pinned already, or where the limit leaves no room.
    """
    return bool(C.late_register_host(address, length))


def unregister_host_memory(address: int) -> bool:
    """Undo it; False where nothing was registered at this address."""
    return bool(C.late_unregister_host(address))
