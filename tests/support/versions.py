"""Where a version of PyTorch itself is why a test can't hold, one line each."""

from __future__ import annotations

import pytest
import torch

from zinf_compile import PartitionedParameterError
from zinf_compile._torch import LEAVES_RECURRENT_FORWARDS

_2_11 = torch.__version__.startswith("2.11.")

guards_requires_grad = not _2_11
"""Whether Dynamo compiles anew where a parameter's `requires_grad` changed; else users call `torch.compiler.reset()`."""
needs_guard_of_requires_grad = pytest.mark.xfail(
    not guards_requires_grad, raises=PartitionedParameterError, reason="Dynamo runs the old graph"
)
compiling_is_known_to_other_threads = not _2_11
"""Whether `torch.compiler.is_compiling()` is true in all threads while a backend of Dynamo runs in one of them."""
leaves_recurrent_forwards = pytest.mark.skipif(
    not LEAVES_RECURRENT_FORWARDS, reason="Dynamo compiles what comes before and after a recurrent layer"
)
numbers_nodes_as_readme = pytest.mark.xfail(
    _2_11, raises=AssertionError, strict=False, reason="torch.fx gives copied nodes other numbers, where a dump shows any"
)
counts_operators_as_readme = pytest.mark.xfail(
    not torch.__version__.startswith("2.13."),
    raises=AssertionError,
    strict=False,
    reason="other versions of PyTorch may take a loss apart into more operators, or fewer",
)
