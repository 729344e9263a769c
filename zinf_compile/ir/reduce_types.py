"""The data types of reductions, as option `reduce_dtype` takes them."""

from __future__ import annotations

import torch

from zinf_compile.errors import OptionError

REDUCE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types in which gradients may be reduced: every transport supports their sum."""


def parse_dtype(value: torch.dtype | str | None, *, option: str) -> torch.dtype | None:
    """Turn a type of `REDUCE_TYPES`, or its name, into the type; raise `OptionError` naming `option` for anything else."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in REDUCE_TYPES}
    found = names.get(value.removeprefix("torch.")) if isinstance(value, str) else value
    if found is None and value is None:
        return None
    if found not in REDUCE_TYPES:
        raise OptionError(f"option {option}={value!r} is not known; accepted: torch.{', torch.'.join(names)}, or their names")
    return found
