"""Unmodified optimizers on shards: their steps, chunk by chunk where states are off the device, and their states as users read
them.

chunk_step — One chunk in a step of the optimizer: what stands in for its parameters, and what becomes of their new values
    and states.
chunk_transfers — Chunks between memory and drives: the states that live there are read ahead of a chunk's update and
    written behind it.
chunked_step — The part of a step that is done chunk by chunk: at once, or left to the next forward.
chunks — Which pieces of an optimizer's parameters are updated together, and what each of them consists of.
closure_step — Steps whose closure partitions the model, at its first compiled call: shards take the parameters' place once
    it has run.
deferred_step — What is left of a step, done beside the next forward: exactly what would have been done at once.
elementwise_probe — Tell optimizers that update element by element from those that need whole matrices.
elementwise_trial — An optimizer tried on a tensor of its own: what it keeps, and whether a piece alone is updated as it is
    within the whole.
fused_kernels — Fused kernels for optimizers whose user left the choice open.
lent_state — A state that was read from a drive for code that may change it: known for as long as anybody can see its
    memory.
load_states — States that were loaded, replaced, changed or taken out of `optimizer.state` between two steps: moved to where
    they live.
offloaded_states — Steps whose parameters, gradients or states aren't where they are updated: chunk by chunk, reading ahead,
    writing behind.
precision — States in fp32 of parameters in 16 bits: kept as they are where PyTorch would round them.
record — What this package knows of an optimizer, from its first step for as long as it lives: one record for each.
running_step — A step that has begun: the stand-in on which the optimizer's own `step` runs, and what stands there for each
    parameter.
shard_state — Between what a user sees of a parameter's gradient and states, and the flat shards that an optimizer works on.
split_states — ZeRO-1 for whole parameters: each rank keeps and updates 1/N of the states of what no graph partitions.
stand_in — A stand-in for an optimizer: an object of its class and attributes, whose groups hold what one step, or one
    chunk, updates.
state_accounts — What an optimizer's states take: checked against the caps before the first step makes them, and told to the
    ledgers.
state_dict_hooks — Which optimizers are stepped chunk by chunk, and their hooks: states are whole while `state_dict` is
    taken.
state_entry — What `optimizer.state` has of a parameter whose states live on a drive: a dict that reads a value when it is
    asked for it.
state_exchange — States that live on a drive, brought into memory for who reads `optimizer.state` or takes a `state_dict`.
state_layout — Which elements of a parameter a rank's states are of: noted beside the states, compared where states are
    loaded.
state_table — Which states the parameters of one optimizer have, and what `optimizer.state` has of them where they live on
    drives.
step_gradient — Snapshot of a gradient at `optimizer.step()`: a deferred step reads it, so later changes of `parameter.grad`
    don't reach it.
step_hooks — Unmodified optimizers on shards: before `step` they are given this rank's part of every partitioned parameter.
step_records — Notes each step of an optimizer on the units that it updated, for the ranks to compare
    (`runtime/comm/steps_done.py`).
step_under_way — Optimizers whose `step(closure)` makes the first compiled call of a model: their step began on whole
    parameters.
"""
