"""How much a partitioned model takes on this rank, from the runtime's own account."""

from __future__ import annotations

from torch import nn

from zinf_compile.sharded.parameter import ShardedParameter


def memory(model: nn.Module) -> dict[str, dict[str, int]]:
    """Return bytes on this rank: `{"now": {...}, "peak": {...}}`, each with params, grads, states, gathered, staged and bounced.

    `params`, `grads` and `states` are this rank's shards with their padding, of all models partitioned over these ranks;
    `gathered` are full units in use or on their way, in the type in which they travel; `staged` is what else is on its way, and
    `bounced` memory for blocks that drives can't move from and to where they are. Empty counts before the first compiled call.
    """
    for parameter in model.parameters():
        if isinstance(parameter, ShardedParameter):
            ledger = parameter._zinf_unit.context.memory.ledger
            return {"now": ledger.now(), "peak": ledger.peak()}
    return {"now": {}, "peak": {}}
