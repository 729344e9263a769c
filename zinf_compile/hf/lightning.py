"""Lightning's `Trainer` with states on drives: each rank writes and reads its own beside the trainer's checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zinf_compile.checkpoint.load import load
from zinf_compile.checkpoint.save import save
from zinf_compile.optim.state_dict_hooks import drive_bytes


def adopt_lightning(trainer: Any) -> None:
    """Replace methods of this one trainer's strategy; see `zinf_compile.hf.adopt`."""
    _Adopted(trainer)


class _Adopted:
    """Replacements for methods of a strategy, with the originals. Where no states are on drives, the originals run."""

    def __init__(self, trainer: Any) -> None:
        strategy = self._strategy = trainer.strategy
        self._state, self._save = strategy.optimizer_state, strategy.save_checkpoint
        self._read, self._load, self._remove = (
            strategy.load_checkpoint,
            strategy.load_optimizer_state_dict,
            strategy.remove_checkpoint,
        )
        self._folder: Path | None = None
        """Of the states beside the checkpoint that was read last."""
        strategy.optimizer_state, strategy.save_checkpoint = self.optimizer_state, self.save_checkpoint
        strategy.load_checkpoint, strategy.load_optimizer_state_dict = self.load_checkpoint, self.load_optimizers
        strategy.remove_checkpoint = self.remove_checkpoint

    def optimizer_state(self, optimizer: Any) -> Any:
        """Return nothing for states on drives, which `save_checkpoint` saves."""
        return {} if self._on_drives() else self._state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Save the states before the checkpoint that they belong to."""
        if "optimizer_states" in checkpoint and self._on_drives():
            save(states_beside(filepath), self._strategy.lightning_module, self._strategy.optimizers, wait=True)
        self._save(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Note where the states are."""
        self._folder = states_beside(checkpoint_path)
        return self._read(checkpoint_path, *args, **kwargs)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states, and the model once more, from where each rank's own are."""
        if self._folder is None or not self._folder.is_dir():
            self._load(checkpoint)
        else:
            load(self._folder, self._strategy.lightning_module, self._strategy.optimizers)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove the states with their checkpoint."""
        self._remove(filepath)
        if self._strategy.is_global_zero:
            shutil.rmtree(states_beside(filepath), ignore_errors=True)

    def _on_drives(self) -> bool:
        return any(drive_bytes(optimizer) for optimizer in self._strategy.optimizers)


def states_beside(filepath: str | os.PathLike[str]) -> Path:
    """Return the folder of the states that belong to a checkpoint."""
    return Path(f"{os.fspath(filepath)}.states")
