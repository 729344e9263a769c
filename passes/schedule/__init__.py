"""Passes that write the schedule of one graph: gathers, releases, swaps, prefetch.

align_regions — Move transfers to the boundaries of regions, so that each region's compute is compiled as one.
drop_gathers — Read parameters that hold their values instead of gathering them.
group_units — Group transfers that are neighbours in order of use.
hand_on_units — Hand units on from a forward to its backward where the plan says so.
insert_gathers — Gather each partitioned unit in front of its uses.
insert_releases — Release each gathered unit right after its last use.
insert_row_lookups — Gather single rows for an embedding, where they are fewer bytes than its parameter.
insert_swaps — Swap shards in to the device in front of their gathers, and swap reduced gradients out.
keep_for_backward — Keep units gathered in a forward for its backward, where the plan says so.
keep_gathered — Keep units gathered between two uses where the plan says so.
merge_gathers — Keep a unit gathered between two uses where that doesn't raise the peak of gathered bytes.
narrow_gathers — Gather a parameter in the narrower data type of its uses.
prefetch — Start each gather ahead of its use.
prefetch_swaps — Start each swap ahead of its gather.
read_kept_units — Read units that the forward has kept, instead of gathering them again.
sink_unit_views — Move views and casts of parameters to their uses.
start_gathers — Start each gather at the boundary that the plan says.
start_swaps — Start each hop of a shard to the device at the boundary that the plan says.
"""
