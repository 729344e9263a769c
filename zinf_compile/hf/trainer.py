"""transformers' `Trainer` with a partitioned model: no DDP, and checkpoints by collective calls."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from zinf_compile.checkpoint.gathered import full_state_dict, gathered
from zinf_compile.checkpoint.save_optimizer_state import units_of
from zinf_compile.checkpoint.save_safetensors import save_safetensors
from zinf_compile.sharded.arguments import plain

from .accelerator import adopt_accelerator
from .files import (
    context_of,
    has_optimizer,
    has_weights,
    is_ours,
    load_optimizer,
    load_weights,
    save_optimizer,
    unwrapped,
)
from .states_beside import write_file


def adopt_trainer(trainer: transformers.Trainer) -> None:
    """Replace methods of this one trainer; see `zinf_compile.hf.adopt`."""
    adopt_accelerator(trainer.accelerator)
    _Adopted(trainer)


class _Adopted:
    """Replacements for methods of a trainer, with the originals.

    The trainer calls each of them on all ranks. With no partitioned parameter, as before the first step of a compiled model, the
    trainer's own method runs.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._create_accelerator = trainer.create_accelerator_and_postprocess
        self._save = trainer._save
        self._save_optimizer = trainer._save_optimizer_and_scheduler
        self._load_optimizer = trainer._load_optimizer_and_scheduler
        self._load = trainer._load_from_checkpoint
        self._load_best = trainer._load_best_model
        self._evaluation_loop = trainer.evaluation_loop
        trainer.create_accelerator_and_postprocess = self.create_accelerator
        trainer._save = self.save
        trainer._save_optimizer_and_scheduler = self.save_optimizer
        trainer._load_optimizer_and_scheduler = self.load_optimizer
        trainer._load_from_checkpoint = self.load
        trainer._load_best_model = self.load_best
        trainer.evaluation_loop = self.evaluation_loop

    def create_accelerator(self) -> None:
        """Adopt the new accelerator too. A search of batch size or settings creates several."""
        self._create_accelerator()
        adopt_accelerator(self._trainer.accelerator)

    def save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the model, one file at a time unless its class has its own format, and the accompanying files."""
        trainer = self._trainer
        model, folder = plain(trainer.model), output_dir or trainer.args.output_dir
        context = context_of(model)
        own = type(trainer)._save is not transformers.Trainer._save or not isinstance(model, transformers.PreTrainedModel)
        if context is None or state_dict is not None:
            self._save(output_dir, state_dict)
        elif own:
            whole = full_state_dict(model)
            with context.ranks.fail_together(f"saving the model in {folder}"):
                if context.rank == 0:
                    self._save(output_dir, whole)
        else:
            save_safetensors(model, folder)
            with context.ranks.fail_together(f"saving the model in {folder}"):
                if context.rank == 0:
                    self._save_beside(model, folder)

    def _save_beside(self, model: Any, folder: str) -> None:
        """Write the files that `save_pretrained` and the trainer add to the weights."""
        trainer = self._trainer
        model.config.architectures = [type(model).__name__]
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(trainer.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def save_optimizer(self, output_dir: str) -> None:
        """Write the optimizer's full states and the scheduler, as the trainer does on one process."""
        trainer = self._trainer
        optimizer = unwrapped(trainer.optimizer)
        context = units_of(optimizer)[1]
        if context is None:
            self._save_optimizer(output_dir)
            return
        save_optimizer(optimizer, Path(output_dir, OPTIMIZER_NAME), [trainer.model], writes=False)
        with context.ranks.fail_together(f"saving the scheduler in {output_dir}"):
            if context.rank == 0:
                write_file(Path(output_dir, SCHEDULER_NAME), trainer.lr_scheduler.state_dict())

    def load_optimizer(self, checkpoint: str | None) -> None:
        """Load what `save_optimizer` wrote, on any number of ranks."""
        trainer = self._trainer
        optimizer = unwrapped(trainer.optimizer)
        if checkpoint is None:
            self._load_optimizer(checkpoint)
            return
        file, scheduler = Path(checkpoint, OPTIMIZER_NAME), Path(checkpoint, SCHEDULER_NAME)
        ours = units_of(optimizer)[1] is not None or is_ours(file)
        if not ours or not has_optimizer(file) or not scheduler.is_file():
            self._load_optimizer(checkpoint)
        else:
            load_optimizer(optimizer, file, [trainer.model])
            trainer.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def load(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint's model."""
        self._load_into(
            plain(model or self._trainer.model), resume_from_checkpoint, lambda: self._load(resume_from_checkpoint, model)
        )

    def load_best(self) -> None:
        """Load the best checkpoint's model."""
        trainer = self._trainer
        self._load_into(plain(trainer.model), trainer.state.best_model_checkpoint, self._load_best)

    def evaluation_loop(self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, **rest: Any) -> Any:
        """Evaluate; on several ranks a model that generates is whole on each and runs uncompiled.

        Generating calls parts of the model by themselves, and as often on each rank as its own sequences are long.
        """
        trainer, settings = self._trainer, self._trainer.args
        loss_only = settings.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        converts = settings.fp16_full_eval or settings.bf16_full_eval  # which a partitioned model refuses by name
        generates = getattr(settings, "predict_with_generate", False) and not loss_only and not converts
        whole = generates and trainer.accelerator.num_processes > 1
        with contextlib.ExitStack() as stack:
            if whole:
                stack.enter_context(gathered(plain(trainer.model)))
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            return self._evaluation_loop(dataloader, description, prediction_loss_only, **rest)

    def _load_into(self, model: Any, folder: str, otherwise: Any) -> None:
        """Load a full model one parameter at a time. Adapters need the whole model on each rank."""
        context = context_of(model)
        if context is None:
            otherwise()
        elif has_weights(Path(folder)):
            load_weights(model, Path(folder), context)
        else:
            with gathered(model, write=True):
                otherwise()
