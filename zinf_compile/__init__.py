"""ZeRO-Infinity as a compiler: `torch.compile(model, backend="zero_infinity")` trains models partitioned over the ranks."""

import importlib
from types import ModuleType

from zinf_compile.checkpoint.announced import rehearse as _rehearse
from zinf_compile.checkpoint.background import wait_for_save
from zinf_compile.checkpoint.dcp import dcp_state_dict
from zinf_compile.checkpoint.gathered import full_state_dict, gathered, load_full_state_dict
from zinf_compile.checkpoint.load_optimizer_state import load_full_optimizer_state_dict
from zinf_compile.checkpoint.save import save
from zinf_compile.checkpoint.save_optimizer_state import full_optimizer_state_dict
from zinf_compile.checkpoint.save_safetensors import save_safetensors
from zinf_compile.init.from_meta import partition
from zinf_compile.init.load import load
from zinf_compile.init.while_building import partitioned
from zinf_compile.optim.before_updates import before_updates as _before_updates
from zinf_compile.optim.deferred_step import synchronize
from zinf_compile.optim.precision import keep_precision

from .errors import (
    BudgetError,
    CheckpointError,
    CompilationError,
    IllegalGraphError,
    OptionError,
    PartitionedParameterError,
    PlanError,
    RankMismatchError,
    StepFailedError,
    StoreError,
    StoreRequestError,
    StoreWarning,
    UnsupportedModelError,
    UnsupportedOptimizerError,
    ZinfError,
)
from .reset import reset
from .stats import memory, stats
from .timeline import report_steps, timeline

_before_updates(_rehearse)  # of a save, where a folder for checkpoints was announced

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """Import `zinf_compile.hf` at its first use, since transformers and accelerate are no dependencies."""
    if name == "hf":
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BudgetError",
    "CheckpointError",
    "CompilationError",
    "IllegalGraphError",
    "OptionError",
    "PartitionedParameterError",
    "PlanError",
    "RankMismatchError",
    "StepFailedError",
    "StoreError",
    "StoreRequestError",
    "StoreWarning",
    "UnsupportedModelError",
    "UnsupportedOptimizerError",
    "ZinfError",
    "dcp_state_dict",
    "full_optimizer_state_dict",
    "full_state_dict",
    "gathered",
    "keep_precision",
    "load",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "memory",
    "partition",
    "partitioned",
    "report_steps",
    "reset",
    "save",
    "save_safetensors",
    "stats",
    "synchronize",
    "timeline",
    "wait_for_save",
]
