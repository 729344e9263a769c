"""What user code sees of partitioned parameters: the parameters, their gradients, tensors partitioned alike, and eager calls on
them.

allowed_homes — The tiers on which states may live, from the words and budgets of the options.
arguments — What user code gives as a model and as an optimizer.
budget — Check of a captured graph against the caps, and the bytes that its transfers may hold ahead of their use.
budget_checks — Checks against the caps outside of graphs: of shards before they are made, of states, of second gradients.
call_names — Names of calls as the user writes them, from the function or operator that PyTorch hands to an override.
call_checks — Checks of each call of a graph within the caps, before it runs: of second gradients, and of what earlier calls
    left behind.
calls — Calls of user code on partitioned tensors, before autograd sees them.
caps — Caps on the memory of a rank, in bytes, as declared by options or as the process may use it, and the bytes held.
compute_budget — Memory of one captured graph's compute, as `GraphBudget` counts it within a declared `device_memory`.
compute_to_come — An estimate of what graphs to come compute at once, for decisions made before they are known.
data_assignment — Changes of parameters whose values are on this process: arguments that a call changes, and
    `parameter.data = value`.
dispatch — Connects partitioned parameters, tensors and gradients with the calls and operators on them.
eager_collectives — Collectives for what eager code of a forward uses whole on several ranks: a gather, and the reduction of
    its gradient.
eager_gradients — Gradients that eager code computes whole: cut on one rank, reduced on several, where each rank's is that of
    its own batch.
earlier_gradients — Gradients that parameters have already when they are spread over ranks: of eager code, or loaded.
eligibility — Eligibility of parameters for partitioning: dense, real, of `torch.nn.Parameter`'s own class.
fit — By how much the graphs of a step exceed the caps, at homes of parameters and with some saved values away.
gathered_copies — Copies of whole values that eager calls are given: what such a call writes to one, or to a view of one,
    would be lost.
gradient — The gradient of a partitioned parameter: autograd sees the logical shape, each rank holds its reduced shard.
gradient_norms — Norms of whole gradients from the shards of all ranks, for all gradients of a model in one exchange.
gradient_ops — Operators on gradients: element by element on the shards, norms and reductions over all ranks, the rest on a
    single rank.
gradient_reductions — Largest element, sum and other numbers of whole gradients, from the shards of all ranks; random
    numbers shaped like them.
gradient_scaling — What `GradScaler` does to partitioned gradients: unscaling them, and whether all are finite.
gradient_types — The type that a gradient shows, its parameter's, beside the one in which its shard is kept, and how
    arithmetic keeps both.
graph_needs — What the forward and the backward of one captured graph need within the caps, and the refusal that names a
    cap for both.
graph_room — The memory that a planner may use for the units of one graph, region by region.
held_values — Whole values that autograd still needs after a parameter was partitioned.
hollow_calls — Calls on parameters whose own memory is hollow: one handling for partitioned parameters and for
    materializing ones.
homes_ahead — Homes of parameters that are partitioned before any graph is known.
host_shortage — Host memory for whole values outside of graphs: whether there is room, and which caps work where there is
    none.
left_norms — Norms of gradients that have left their device: who asks for them in each step gets those that were taken
    before.
metadata_calls — Calls on partitioned parameters that need no value: those that read metadata, and conversions to what it is
    already.
offloaded_storage — The storage of values that are off the device: its size is known, its bytes are loaded when they are
    read.
offloaded_value — The value of a parameter off the device, on one process: a tensor that loads it when it is read.
operands — Operands of an operation on shards: the arguments that have a shard, and whether they are partitioned alike.
operators — Operators on tensors that are partitioned alike: element by element on the shards, wherever these are.
ordinary — Models that are compiled, and whose parameters stay ordinary ones because nothing would move.
other_graphs — Memory that other graphs will take: for parameters that no graph has seen yet, and for what earlier graphs
    don't hold yet.
parameter — A partitioned parameter as the user's code sees it: the same object, hollow, answering for its metadata only.
parameter_calls — Eager calls on partitioned parameters: on shards, on whole values where this process has them, or refused
    with the way out.
parameter_ops — Eager calls on partitioned parameters whose values are spread over ranks or off the device: on shards, where
    these serve.
partition — Partitioning of whole parameters: rank 0's values, spread over the ranks. Called by the first compiled call
    that uses them.
partition_alike — Partitioning of whole tensors like the parameter beside which they are changed: those made before it
    was partitioned.
place_at_call — Homes of parameters that a compiled graph first sees at a call, in the place of those that it was compiled
    with.
planned_parameters — Parameters that earlier graphs planned for, whose chunks pass through memory in steps.
recompile_limit — Dynamo's limit of recompilations: raised for compiled models, and a warning where a function exceeds
    it.
reductions — Sums, norms, extremes and comparisons of tensors that are partitioned alike, the same on all ranks. Collective
    operations.
save_check — Parts of a model that can't be saved through its `state_dict()`: reported at the first step, not at the
    first save.
saved_on_host — Host memory beside a device for the values that forwards save there: several graphs may do so before the first
    backward.
shard_pieces — A function on shards, a piece at a time: the next piece is read, and the last one written, while one is
    computed.
shared_memory — Memory that a parameter shares with other tensors when it is partitioned.
short_ranks — Refusals for lack of memory that all ranks raise together.
shortage — Messages of refusals for lack of memory: the bytes needed, the smallest cap that works, and options that take
    less.
synchronised_buffers — Buffers that a graph's first call leaves as they are on each rank.
tensor — A tensor that is partitioned like a parameter: averages, slow weights, perturbations, and what is computed from
    parameters.
tiled_gradient_ops — Changes of gradients that are off the device and too large to load whole: tile by tile.
training_to_come — An estimate of what a backward will pass of parameters, from an evaluation of them that comes first.
unpartitioned — Parameters of a partitioned model that no graph uses: whole on every rank, their gradients averaged.
unpartitioned_report — Report at the first step of what is whole on every rank: parameters that no compiled graph uses,
    and their states.
unplanned — Units that were made before any graph: nothing has planned for their gradients and updates yet.
whole_values — Calls that need whole values of partitioned tensors: they are loaded or gathered, where that is possible.
wrapping_optimizers — Optimizers that work through others, which they keep: the steps of those have hooks of their own.
"""

from . import dispatch as dispatch
