"""ZeRO-Infinity as a compiler: `torch.compile(model, backend="zero_infinity")` trains models partitioned over the ranks."""

from .checkpoint import full_state_dict, gathered, load_full_state_dict
from .errors import (
    CompilationError,
    IllegalGraphError,
    OptionError,
    PartitionedParameterError,
    RankMismatchError,
    UnsupportedModelError,
    UnsupportedOptimizerError,
    ZinfError,
)
from .memory import memory

__version__ = "0.1.0"

__all__ = [
    "CompilationError",
    "IllegalGraphError",
    "OptionError",
    "PartitionedParameterError",
    "RankMismatchError",
    "UnsupportedModelError",
    "UnsupportedOptimizerError",
    "ZinfError",
    "full_state_dict",
    "gathered",
    "load_full_state_dict",
    "memory",
]
