"""`zinf_compile.reset()`: a process starts anew, as if it had compiled and partitioned nothing."""

from __future__ import annotations

import gc

import torch

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
    """Let go of everything that this process has made: a notebook, or the next test, can start anew.

        zinf_compile.reset()
        model = MyModel()                       # as in a new process: same numbers, no thread or file of the models before
        model.compile(backend="zero_infinity")

    Process groups (the user's own stay), threads, files of states on drives, memory for transfers, the values, gradients and
    optimizer states of every model partitioned so far, compiled graphs, and what ranks agreed on: all of it is gone. So are
    Dynamo's caches, with the graphs of other backends.

    A model partitioned before stays an object, but what reads, calls or saves it raises `PartitionedParameterError`: save
    `full_state_dict(model)` first, and load it into a new one. A step that still goes on beside the next forward ends
    unfinished; `synchronize()` before completes it, and raises what it raised.

    This rank alone lets go: other ranks needn't be there, so it works after an error of theirs too. Ranks that go on together
    all call it between the same two steps. Raises `UnsupportedModelError` inside `partitioned()`, and
    `PartitionedParameterError` inside `gathered()`: then nothing is let go of.
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
    for context in contexts:
        context.ending = True  # a step beside the next forward ends at its next chunk
    end_deferred_steps()
    drop_states()
    for context in contexts:
        close_context(context)
    close_all_stores()
    forget_all()
    torch.compiler.reset()
    gc.collect()
