"""Analyses of scheduled graphs: stages, memory, traffic, and graphs as text. They change no graph.

blocks — Block boundaries of the model, from names, order and sizes of units alone. `align_regions` and `group_units` cut
    there.
compute_account — The account of compute's memory, for any choice of gradients that stay where they are made.
compute_choices — Accounts of one graph for each choice of the saved values that stay, made of two of them.
compute_graph — Facts of a graph that its account reads: runs that may be fused, bytes of results, aliases.
compute_memory — Memory of one graph's compute, an upper bound: saved activations and temporaries. `GraphBudget` counts it.
fold_blocks — Folding of a summary: lines that repeat from block to block of a model are printed once. `summary` calls it.
gather_stages — Stages of a schedule: runs of adjacent gathers, and the stages at which their units are released.
keepable_units — Units that a forward gathers and its backward would gather again.
library_memory — Memory that kernels of PyTorch take on the CPU beside their results.
liveness — Memory of the values that compute makes, region by region. `step_problem` calls it.
memory_needs — Minimum device memory of a graph's schedule. The backend calls it; the plan budgets with its result.
planned_graph — A plan as passes look things up in it: by the parameters and regions of one graph.
print_graph — Graphs as text, one operator a line. `zinf dump`, `summary` and the tests call it.
region_facts — Operators, modules, floating-point operations and bytes of the compute between transfers.
repeatable — Compute of a forward that can run a second time with the same results, and what it reads.
run_again — What it takes that compute of a forward runs again in its backward: seconds, and what is gathered once more.
saved_memories — Memory that a forward makes and its backward reads, which may leave the device in between.
saved_stretches — Stretches of two graphs in which saved memory moves, and between which of them each is away.
saved_time — How long saved memory is away from the device, and which of it is alike in equal blocks.
saved_values — Values that travel from a forward to its backward. `step_problem` calls it.
step_facts — What `step_problem` must know beside the graphs.
step_problem — The problem of a step from its graphs, which planners solve.
step_regions — Regions of a graph by number, as problems and plans refer to them.
stretches — The compute of a scheduled graph between two transfers, as it is compiled.
summary — Summary of a scheduled graph: one line per transfer, one per region of compute. `zinf dump` prints it.
traffic — Bytes that a scheduled graph moves over each link, and holds at its peak, per rank. Dumps and planning call it.
transfer_graph — Dependencies of a schedule as a networkx graph: nodes are transfers, waits, releases and regions of
    compute.
"""
