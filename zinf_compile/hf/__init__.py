"""transformers' Trainer, accelerate and Lightning with the `zero_infinity` backend."""

from __future__ import annotations

import importlib.util
from typing import Any, TypeVar

Adoptable = TypeVar("Adoptable")


def adopt(trainer_or_accelerator: Adoptable) -> Adoptable:
    """Make a `transformers.Trainer`, a bare `accelerate.Accelerator` or a `lightning.Trainer` work with partitioned models.

        trainer = zinf_compile.hf.adopt(transformers.Trainer(model=model, args=args, ...))
        accelerator = zinf_compile.hf.adopt(accelerate.Accelerator())
        trainer = zinf_compile.hf.adopt(lightning.Trainer(...))  # needed where states are on drives; one process

    Called once, right after construction, on all ranks. It replaces methods of this one object. `prepare_model` doesn't wrap a
    compiled model, of any backend, in DDP: the graphs of a partitioned model average its gradients. Checkpoints are saved and
    loaded by collective calls, so every method that saves or loads must be called on all ranks.

    Rank 0 writes weights as safetensors, with one file's tensors in memory at a time; they are read one parameter at a time.
    Optimizer states in memory are one file of full states, which needs host memory for all of them on rank 0 and loads on any
    number of ranks. Those on drives are a folder beside (`optimizer`, or the checkpoint's name with `.states`), which each rank
    writes its own part of by `zinf_compile.save`, and which `zinf_compile.load` reads. The file names the save in that folder
    that belongs to it: a process killed at any moment leaves both of one checkpoint. While rank 0 writes a file the others wait,
    at most for option `timeout_s` of the backend. On several nodes all ranks must see the folder that rank 0 writes. peft's
    adapters, trainers with their own `_save` and pickled files need the whole model in rank 0's memory for saving; adapters
    need it on each rank for loading, and so does evaluation with `predict_with_generate` on several ranks, which runs uncompiled.

    Raises `TypeError` for anything else, `UnsupportedModelError` for an accelerator that is set up for FSDP, DeepSpeed or
    Megatron-LM.
    """
    target: Any = trainer_or_accelerator
    if getattr(target, "_zinf_adopted", False) is True:
        return trainer_or_accelerator
    if _is(target, "accelerate", "Accelerator"):
        from .accelerator import adopt_accelerator  # noqa: PLC0415  (accelerate and transformers are no dependencies)

        adopt_accelerator(target)
    elif _is(target, "transformers", "Trainer"):
        from .trainer import adopt_trainer  # noqa: PLC0415

        adopt_trainer(target)
    elif _is(target, "lightning", "Trainer") or _is(target, "pytorch_lightning", "Trainer"):
        from .lightning import adopt_lightning  # noqa: PLC0415

        adopt_lightning(target)
    else:
        missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
        hint = f" ({' and '.join(missing)} can't be imported here)" if missing else ""
        raise TypeError(
            f"adopt() was given a {type(target).__module__}.{type(target).__qualname__}; accepted: a transformers.Trainer, or an "
            f"accelerate.Accelerator, or a lightning.Trainer{hint}. A model needs nothing: model.compile(backend='zero_infinity')"
        )
    target._zinf_adopted = True
    return trainer_or_accelerator


def _is(target: object, library: str, name: str) -> bool:
    """Return whether an object is of a library's class, without importing the library."""
    return any(kind.__name__ == name and kind.__module__.split(".")[0] == library for kind in type(target).__mro__)
