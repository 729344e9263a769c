"""accelerate's `Accelerator` with partitioned models: no DDP, and checkpoints by collective calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from zinf_compile._torch import is_compiled
from zinf_compile.checkpoint.gathered import full_state_dict
from zinf_compile.checkpoint.save_safetensors import save_safetensors
from zinf_compile.errors import UnsupportedModelError
from zinf_compile.sharded.parameter import ShardedParameter

from .files import PICKLED, context_of, load_optimizer, load_weights, save_optimizer, unwrapped
from .states_beside import write_file

_PLAIN = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Values of `distributed_type` with which accelerate doesn't change models and optimizers itself."""


def adopt_accelerator(accelerator: Any) -> None:
    """Replace methods of this one accelerator, once; see `zinf_compile.hf.adopt`."""
    if getattr(accelerator, "_zinf_adopted", False) is True:
        return
    kind = accelerator.distributed_type.name
    if kind not in _PLAIN:
        raise UnsupportedModelError(
            f"this accelerator is set up for {kind}, which partitions or moves models by itself; accepted: {', '.join(_PLAIN)}. "
            "Launch without its plugin (accelerate config: no FSDP, DeepSpeed or Megatron-LM); this backend partitions the model"
        )
    _Adopted(accelerator)
    accelerator._zinf_adopted = True


class _Adopted:
    """Replacements for methods of an accelerator, with the originals."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._prepare_model = accelerator.prepare_model
        self._get_state_dict = accelerator.get_state_dict
        self._save_model = accelerator.save_model
        self._save_state = accelerator.save_state
        self._load_state = accelerator.load_state
        self._saving = self._pickles = False
        accelerator.prepare_model = self.prepare_model
        accelerator.get_state_dict = self.get_state_dict
        accelerator.save_model = self.save_model
        accelerator.save_state = self.save_state
        accelerator.load_state = self.load_state
        accelerator.register_save_state_pre_hook(self._write)
        accelerator.register_load_state_pre_hook(self._read)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Prepare compiled models as for evaluation, which differs from training only by DDP."""
        ours = is_compiled(model) or any(isinstance(p, ShardedParameter) for p in model.parameters())
        prepared: nn.Module = self._prepare_model(
            model, device_placement=device_placement, evaluation_mode=evaluation_mode or ours
        )
        return prepared

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state dict on rank 0 and an empty one on the others, for a partitioned model. Collective."""
        if self._saving:
            return {}  # `_write` saves it, one file's tensors at a time
        if context_of(model) is None:
            state: dict[str, Any] = self._get_state_dict(model, unwrap=unwrap)
            return state
        return full_state_dict(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write safetensors, one file's tensors in memory at a time; pickled files need the whole model's on rank 0."""
        if context_of(model) is None or not safe_serialization:
            self._save_model(model, save_directory, max_shard_size=max_shard_size, safe_serialization=safe_serialization)
        else:
            save_safetensors(model, save_directory, file_bytes=max_shard_size)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **rest: Any) -> Any:
        """Save with models and optimizers left to `_write`."""
        self._pickles = not safe_serialization
        return self._without_optimizers(self._save_state, (output_dir, safe_serialization), rest)

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load with models and optimizers left to `_read`."""
        return self._without_optimizers(self._load_state, args, kwargs)

    def _without_optimizers(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        accelerator = self._accelerator
        self._optimizers, accelerator._optimizers = accelerator._optimizers, []
        self._saving = True
        try:
            return method(*args, **kwargs)
        finally:
            self._saving = False
            accelerator._optimizers = self._optimizers

    def _write(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Save models and optimizers before accelerate saves the rest."""
        weights.clear()
        first = self._accelerator.is_main_process
        for index, model in enumerate(models):
            if not first and context_of(model) is None:
                continue
            folder = _folder(output_dir, index)
            if self._pickles:
                state = full_state_dict(model)
                if first:
                    folder.mkdir(parents=True, exist_ok=True)
                    write_file(folder / PICKLED, state)
            else:
                save_safetensors(model, folder)
        for index, optimizer in enumerate(self._optimizers):
            save_optimizer(unwrapped(optimizer), _file(output_dir, index), models, writes=first)
        self._accelerator.wait_for_everyone()

    def _read(self, models: list[nn.Module], input_dir: str) -> None:
        """Load models and optimizers before accelerate loads the rest."""
        for index, model in enumerate(models):
            context = context_of(model)
            load_weights(model, _folder(input_dir, index), context)
        for index, optimizer in enumerate(self._optimizers):
            load_optimizer(unwrapped(optimizer), _file(input_dir, index), models)
        models.clear()


def _folder(where: str, index: int) -> Path:
    return Path(where, f"model_{index}") if index else Path(where)


def _file(where: str, index: int) -> Path:
    return Path(where, f"optimizer_{index}.bin" if index else "optimizer.bin")
