"""`zinf_compile.load`: a checkpoint onto a model that is partitioned, whole or on meta."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zinf_compile.checkpoint.intake import DType, Rename
from zinf_compile.checkpoint.load import load as load_checkpoint
from zinf_compile.runtime.system.accelerator import numbered
from zinf_compile.sharded.arguments import plain

from .onto_meta import OntoMeta, is_on_meta


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    dtype: DType | None = None,
    rename: Rename | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Load the newest checkpoint of a folder, or the one that it is, which `save` has made; return its `extra`.

    A collective operation, on any number of ranks, tiers and tiles, for a model that is partitioned, whole, or on meta. One on
    meta was compiled before, with the options that say where its values go: they go straight there, on `device`, and parameters
    stay the same objects, so that optimizers made before are good.

    Gradients become those that were accumulated at the save: of a parameter that had none then, there is none afterwards. The
    random generators of each rank become the saved ones; a rank of which the checkpoint has none seeds its own from (seed, rank).
    Everything is checked before anything changes: `CheckpointError` names all mismatches, `BudgetError` the smallest cap that
    works, on all ranks. A load that ends in its middle, as on a file that is damaged, leaves the model and its optimizers refused
    by `StepFailedError` until a load succeeds; a model that was on meta is on meta again.

    Checkpoints of DeepSpeed (ZeRO-1, 2, 3, universal) and files of `torch.save` are loaded alike; nothing in them is executed.

    `dtype`: the type that floating-point parameters and buffers are converted to, or a mapping of names in the model to types.
    `rename`: a mapping of names in the checkpoint to names in the model, or a function. `CheckpointError` names all collisions,
    all names that match nothing and all conversions that lose more than digits behind the point.
    """
    meta = OntoMeta(model, numbered(torch.device(device))) if is_on_meta(plain(model)) else None
    return load_checkpoint(folder, model, optimizer, dtype=dtype, rename=rename, meta=meta)
