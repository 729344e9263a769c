"""Connects partitioned tensors and gradients with the operators on them.

The operators make such tensors, so their modules import the classes; the classes call the operators through what is set here.
The package imports this file: no class of it is ever there without its operators.
"""

from __future__ import annotations

from .calls import answer_call
from .gradient import ShardedGradient
from .gradient_ops import answer_for_gradient
from .operators import answer
from .tensor import ShardedTensor

ShardedGradient._answer = staticmethod(answer_for_gradient)
ShardedTensor._answer = staticmethod(answer)
ShardedTensor._answer_call = staticmethod(answer_call)
