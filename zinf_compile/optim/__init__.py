"""Unmodified optimizers on shards: their steps, chunk by chunk where states are off the device, and their states as users read
them.

before_updates — What has to happen before the first update of an optimizer, on all ranks; `checkpoint` adds the dry run
    of a save.
calls — Which chunks of a step one call of the optimizer updates.
chunk_budget — How many chunks of a step have memory at a time under the caps.
chunk_step — One chunk in a step of the optimizer: the tensors that the stand-in updates, and the write-back of values and
    states.
chunk_transfers — Transfers of chunks between memory and drives: states are read before a chunk's update and written after
    it.
chunked_step — The chunked part of a step: updated in `step()`, or deferred to the next forward.
chunks — Chunks: the pieces of an optimizer's parameters that are updated together, and the columns of each.
closure_step — Steps whose closure partitions the model by its first compiled call: from then on the step runs on shards.
deferrable — Which steps may be deferred to the next forward.
deferred_step — Deferred steps: chunks updated by a worker thread during the next forward, bitwise equal to updating them in
    `step()`.
eager_models — Models that `torch.compile` was to compile with this backend, and of which Dynamo compiled nothing: found at a
    step.
elementwise_probe — Probes whether an optimizer updates element by element, by steps on small tensors: whole, and cut in
    pieces.
elementwise_trial — Trial of an optimizer on a private tensor: its states, and comparisons of a piece alone with the whole.
first_call_in_step — Checks optimizers whose running `step(closure)` makes the first compiled call: their pre-step check saw
    whole parameters.
flat_states — The states of a parameter as the flat shards that an optimizer updates: which of them are the memory of the
    states.
fused_kernels — Chooses fused CPU kernels for Adam and AdamW with default flags.
in_place — Chunks that are updated where they live: their columns, which nothing has to be brought for.
lay_out_anew — Lays the states of a step's chunks out anew, where an optimizer keeps more of them than it did at first.
load_pieces — Loads an optimizer's states to where it keeps them, piece by piece, in an order that is known before the first
    is read.
load_states — Reconciles stored states with `optimizer.state` between steps: new and changed ones move to their tier,
    removed ones reset.
offloaded_states — Chunked steps of parameters, gradients or states that live off the updating device: prefetch, update,
    write back.
pending_states — States in memory while a deferred step has still to update them.
precision — Keeps fp32 states of 16-bit parameters in fp32 where `load_state_dict` would round them.
record — The package's state of each optimizer, from its first step to its collection: one `OptimizerRecord`.
repeated_step — Steps that repeat the last one: they run on its stand-in, whose shards and states still are those of the
    parameters.
running_step — The current step of an optimizer: the stand-in on which its own `step` runs, with a shard in place of each
    parameter.
shard_state — Conversions between a parameter's gradient and states as the user sees them and the flat shards that an
    optimizer updates.
split_states — ZeRO-1 for whole parameters: each rank keeps and updates 1/N of the states of what no graph partitions.
stand_in — Stand-ins for an optimizer: objects of its class and attributes, whose groups hold the tensors of one step or one
    chunk.
state_accounts — Memory of an optimizer's states: checked against the caps before the first step, then added to the ledgers.
state_copy — Host copy of a state on a drive, given to user code that may change it; tracked until no alias of its memory is
    left.
state_dict_hooks — Sets up chunked steps for an optimizer, with hooks that read states from drives for `state_dict` and
    write loaded ones.
state_entry — Entries of `optimizer.state` for parameters with states on a drive: dicts that read a value on access.
state_exchange — Reads states from a drive into host memory, for readers of `optimizer.state` and for `state_dict()`.
state_layout — Layout of a rank's states: the elements that they belong to, saved with the states and compared when they are
    loaded.
state_pieces — This rank's states of an optimizer, piece by piece, wherever they live: read to be saved.
state_ranges — Any range of elements of this rank's shard of one state: read and written wherever it lives, without
    the others.
state_table — Table of the states that the parameters of one optimizer have, and their entries in `optimizer.state`.
states_to_come — The states that an optimizer is going to have of each parameter, known before its first step: what a
    save would find then.
step_gradient — Snapshot of a gradient at `optimizer.step()`: what a deferred step applies, whatever becomes of
    `parameter.grad`.
step_hooks — Step hooks that let unmodified optimizers update this rank's shards of partitioned parameters.
step_records — Records each step of an optimizer on the units that it updates, for the ranks to compare
    (`runtime/comm/steps_done.py`).
step_saves — Saves that begin while a deferred step is under way: what it has still to make, they take from it as it is
    made.
timed_update — Times of updates, for whoever records a step.
unused — Partitioned parameters that nothing has used yet: they may still be cut into other tiles.
watched_states — States in memory that a save in the background has still to write, and the dict that lets nobody change them
    before.
"""
