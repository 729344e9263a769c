"""What travels from a forward to its backward in the place of values that leave the device: tensors without bytes.

The executor makes them and reads them; AOTAutograd and autograd carry them. Knows no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from zinf_compile._torch import no_override
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.ir.value_spans import ValueForm

from .value_memory import ValueMemory

_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class SavedValue(torch.Tensor):
    """A stand-in for a value whose memory has left the device: its metadata, and where the memory is.

    The memory is given back with the last stand-in for one of its values: after the backward, or where that never comes. Whoever
    reads it outside of the graph gets `UnsupportedModelError`.
    """

    __torch_function__ = no_override  # type: ignore[assignment]
    memory: ValueMemory
    form: ValueForm
    called: str

    @staticmethod
    def __new__(cls, memory: ValueMemory, form: ValueForm, dtype: torch.dtype, name: str) -> SavedValue:
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(form.shape), strides=tuple(form.stride), dtype=dtype, device=memory.device, requires_grad=False
        )

    def __init__(self, memory: ValueMemory, form: ValueForm, dtype: torch.dtype, name: str) -> None:
        self.memory, self.form, self.called = memory, form, name

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SavedValue({self.called}, {tuple(self.shape)}, {self.dtype}, on {self.memory.tier})"

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the value in memory that was brought back."""
        start, _ = self.memory.span
        first = memory.storage_offset() + self.form.offset * self.form.itemsize - start
        value = torch.empty(0, dtype=self.dtype, device=memory.device)
        return value.set_(memory.untyped_storage(), first // self.form.itemsize, self.form.shape, self.form.stride)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what doesn't read values."""
        if func in _ALIASES:
            of = args[0]
            return SavedValue(of.memory, of.form, of.dtype, of.called)
        _refuse(func, next((a for a in (*args, *(kwargs or {}).values()) if isinstance(a, SavedValue)), None))


def _refuse(func: Callable[..., Any], value: SavedValue | None) -> NoReturn:
    name, tier = ("a saved value", "its tier") if value is None else (value.called, value.memory.tier)
    raise UnsupportedModelError(
        f"{func} reads {name}, a value that a compiled forward saved for its backward and that option activations moved to "
        f"{str(tier)!r}: hooks of saved tensors (torch.autograd.graph.saved_tensors_hooks, save_on_cpu) may pass such values on "
        "but not read them. Leave the hooks out, since activations offloads by itself, or use activations='keep'"
    )
