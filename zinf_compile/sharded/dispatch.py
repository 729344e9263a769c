"""Connects partitioned parameters, tensors and gradients with the calls and operators on them.

These make such tensors, so their modules import the classes; the classes reach them through what is set here.
The package imports this file: no class of it is ever there without them.
"""

from __future__ import annotations

from .calls import answer_call
from .gradient import ShardedGradient
from .gradient_ops import answer_for_gradient
from .operators import answer
from .parameter import ShardedParameter
from .parameter_calls import answer_for_parameter
from .tensor import ShardedTensor

ShardedGradient._answer = staticmethod(answer_for_gradient)
ShardedTensor._answer = staticmethod(answer)
ShardedTensor._answer_call = staticmethod(answer_call)
ShardedParameter._answer_call = staticmethod(answer_for_parameter)
