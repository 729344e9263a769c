"""ZeRO-Infinity as a compiler: `torch.compile(model, backend="zero_infinity")` trains models partitioned over the ranks."""

from .birth import partition
from .birth_context import partitioned
from .checkpoint import full_state_dict, gathered, load_full_state_dict
from .errors import (
    BudgetError,
    CheckpointError,
    CompilationError,
    IllegalGraphError,
    OptionError,
    PartitionedParameterError,
    RankMismatchError,
    StepFailedError,
    StoreError,
    StoreWarning,
    UnsupportedModelError,
    UnsupportedOptimizerError,
    ZinfError,
)
from .late_step import synchronize
from .memory import memory
from .optimizer_checkpoint import full_optimizer_state_dict
from .optimizer_loading import load_full_optimizer_state_dict
from .precision import keep_precision
from .save import save_safetensors
from .stats import stats

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "CompilationError",
    "IllegalGraphError",
    "OptionError",
    "PartitionedParameterError",
    "RankMismatchError",
    "StepFailedError",
    "StoreError",
    "StoreWarning",
    "UnsupportedModelError",
    "UnsupportedOptimizerError",
    "ZinfError",
    "full_optimizer_state_dict",
    "full_state_dict",
    "gathered",
    "keep_precision",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "memory",
    "partition",
    "partitioned",
    "save_safetensors",
    "stats",
    "synchronize",
]
