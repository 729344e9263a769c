"""What travels from a forward to its backward in the place of values that the backward makes again: tensors without bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zinf_compile._torch import no_override
from zinf_compile.errors import UnsupportedModelError

_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class DroppedValue(torch.Tensor):
    """A stand-in for a value that was dropped: its metadata. Whoever reads it gets `UnsupportedModelError`."""

    __torch_function__ = no_override  # type: ignore[assignment]
    called: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str) -> DroppedValue:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
        )

    def __init__(self, like: torch.Tensor, name: str) -> None:
        self.called = name

    @classmethod
    def of(cls, value: torch.Tensor, name: str) -> DroppedValue:
        """Return the stand-in for a value."""
        with torch.inference_mode(False), torch.no_grad():
            return cls(value, name)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DroppedValue({self.called}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what doesn't read values."""
        if func in _ALIASES:
            return DroppedValue(args[0], args[0].called)
        value = next((a for a in (*args, *(kwargs or {}).values()) if isinstance(a, DroppedValue)), None)
        raise UnsupportedModelError(
            f"{func} reads {'a saved value' if value is None else value.called}, which a compiled forward has dropped and its "
            "backward makes again (activations='recompute', or 'auto' within device_memory): hooks of saved tensors "
            "(torch.autograd.graph.saved_tensors_hooks, save_on_cpu) may pass such values on but not read them. Leave the hooks "
            "out, or use activations='keep'"
        )
