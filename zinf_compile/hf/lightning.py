"""Lightning's `Trainer` with states on drives: each rank writes and reads its own beside the trainer's checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zinf_compile.checkpoint.save_optimizer_state import units_of
from zinf_compile.optim.state_dict_hooks import drive_bytes
from zinf_compile.runtime.comm.ranks import Ranks

from .states_beside import NamedStates, load_beside, remove_others, save_beside


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
        self._file: Path | None = None
        """The checkpoint that was read last."""
        self._saved: dict[Path, list[int]] = {}
        """Numbers of the states saved by this process, which a file may be about to name, by folder."""
        strategy.optimizer_state, strategy.save_checkpoint = self.optimizer_state, self.save_checkpoint
        strategy.load_checkpoint, strategy.load_optimizer_state_dict = self.load_checkpoint, self.load_optimizers
        strategy.remove_checkpoint = self.remove_checkpoint

    def optimizer_state(self, optimizer: Any) -> Any:
        """Return nothing for states on drives, which `save_checkpoint` saves."""
        return {} if self._on_drives() else self._state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Save the states before the checkpoint that names them; remove those that it doesn't name."""
        file, folder = Path(filepath), states_beside(filepath)
        new: NamedStates | None = None
        if "optimizer_states" in checkpoint and self._on_drives():
            model, optimizers = self._strategy.lightning_module, self._strategy.optimizers
            saved = self._saved.setdefault(folder, [])
            new = save_beside(file, folder, model, optimizers, self._ranks(), pending=saved)
            assert new is not None, "one process"
            saved.append(new.number)
            checkpoint = {**checkpoint, **new.as_plain()}
        self._save(checkpoint, filepath, storage_options=storage_options)
        if self._strategy.is_global_zero:
            remove_others(file, folder, new)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Note where the states are."""
        self._file = Path(checkpoint_path)
        return self._read(checkpoint_path, *args, **kwargs)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states that a checkpoint names, and the model once more, from where each rank's own are."""
        named = NamedStates.of(checkpoint)
        if self._file is None or named is None:
            self._load(checkpoint)
            return
        model, optimizers = self._strategy.lightning_module, self._strategy.optimizers
        folder = states_beside(self._file)
        if not folder.is_dir():  # where the file is a link, as Lightning makes to the last one
            folder = states_beside(os.path.realpath(self._file))
        load_beside(self._file, folder, named, model, optimizers, self._ranks())

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove the states with their checkpoint."""
        self._remove(filepath)
        if self._strategy.is_global_zero:
            shutil.rmtree(states_beside(filepath), ignore_errors=True)

    def _on_drives(self) -> bool:
        return any(drive_bytes(optimizer) for optimizer in self._strategy.optimizers)

    def _ranks(self) -> Ranks | None:
        contexts = (units_of(optimizer)[1] for optimizer in self._strategy.optimizers)
        return next((context.ranks for context in contexts if context is not None), None)


def states_beside(filepath: str | os.PathLike[str]) -> Path:
    """Return the folder of the states that belong to a checkpoint."""
    return Path(f"{os.fspath(filepath)}.states")
