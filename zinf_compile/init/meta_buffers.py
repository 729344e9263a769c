"""Buffers of a model on meta, made real for initialisers to fill, and put back where something fails."""

from __future__ import annotations

import math
from types import TracebackType

import torch
from torch import nn


class MetaBuffers:
    """Context in which they have memory of the host; left without `keep`, they are on meta again."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._made: dict[str, tuple[nn.Module, str, torch.Tensor, int]] = {}
        """By name: where it is, what it was made as, and how often that had been written to then."""

    def __enter__(self) -> MetaBuffers:
        real: dict[int, torch.Tensor] = {}
        for prefix, module in self._model.named_modules():
            for attribute, buffer in module._buffers.items():
                if buffer is None or buffer.device.type != "meta":
                    continue
                if id(buffer) not in real:
                    made = real[id(buffer)] = torch.empty_like(buffer, device="cpu")
                    if made.is_floating_point():
                        made.fill_(math.nan)
                self._before.append((module, attribute, buffer))
                module._buffers[attribute] = made = real[id(buffer)]
                self._made[f"{prefix}.{attribute}" if prefix else attribute] = (module, attribute, made, made._version)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for module, attribute, buffer in self._before:
            module._buffers[attribute] = buffer

    def untouched(self) -> list[str]:
        """Return the names of those that nothing was written to."""
        return [name for name, made in self._made.items() if not _touched(*made)]

    def move(self, device: torch.device) -> None:
        """Move the model's buffers to `device`."""
        moved: dict[int, torch.Tensor] = {}
        for module in self._model.modules():
            for attribute, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[attribute] = moved.setdefault(id(buffer), buffer.to(device))

    def keep(self) -> None:
        """Let them be what they are now."""
        self._before.clear()


def _touched(module: nn.Module, attribute: str, made: torch.Tensor, version: int) -> bool:
    now = module._buffers.get(attribute)
    if now is not made or made._version != version or not made.numel():
        return True
    return made.is_floating_point() and not bool(torch.isnan(made).all())
