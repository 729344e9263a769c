"""`zinf_compile.reset()`: releases everything that the package holds in this process."""

from __future__ import annotations

import gc

import torch

from zinf_compile.checkpoint.background import wait_alone
from zinf_compile.errors import PartitionedParameterError, UnsupportedModelError
from zinf_compile.init.while_building import is_building
from zinf_compile.optim.deferred_step import end_deferred_steps
from zinf_compile.optim.state_accounts import drop_states
from zinf_compile.runtime.close_context import close_context
from zinf_compile.runtime.context import all_contexts
from zinf_compile.runtime.storage.extent_store import close_all_stores
from zinf_compile.runtime.system.process_wide import forget_all
from zinf_compile.sharded.parameter import ShardedParameter


def reset() -> None:
    """Release all resources of the package in this process, so that a notebook or the next test can start again.

        zinf_compile.reset()
        model = MyModel()                       # as in a new process: same numbers, no thread or file of earlier models
        model.compile(backend="zero_infinity")

    Released are process groups (but not the user's own), threads, files of states on drives, transfer buffers, the values,
    gradients and optimizer states of every model partitioned so far, compiled graphs, agreements between ranks, and Dynamo's
    caches, including the graphs of other backends.

    A model partitioned before stays an object, but reading, calling or saving it raises `PartitionedParameterError`: save
    `full_state_dict(model)` first, and load it into a new model. A deferred step ends unfinished: call `synchronize()` first
    to complete it and to get its error. A save in the background is waited for, and its error logged.

    Not a collective operation: it works after an error of other ranks too. Ranks that continue together all call it between the
    same two steps. Raises `UnsupportedModelError` inside `partitioned()`, and `PartitionedParameterError` inside `gathered()`,
    and then releases nothing.
    """
    contexts = all_contexts()
    if is_building():
        raise UnsupportedModelError("zinf_compile.reset() inside partitioned(): leave the block first")
    for context in contexts:
        for unit in list(context.units):
            parameter = unit.parameter()
            if parameter is not None and not isinstance(parameter, ShardedParameter):
                raise PartitionedParameterError(
                    f"zinf_compile.reset() while parameter {unit.name} is gathered: leave `with zinf_compile.gathered(...)` first"
                )
    wait_alone()
    for context in contexts:
        context.ending = True  # a deferred step stops at its next chunk
    end_deferred_steps()
    drop_states()
    for context in contexts:
        close_context(context)
    close_all_stores()
    forget_all()
    torch.compiler.reset()
    gc.collect()
