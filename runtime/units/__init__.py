"""A parameter's shard on this rank: its layout, its memory on its tier, its tiles and what is still to happen to it.

backing — The backings of shards that are off their device.
companion_memory — Memory for tensors that are partitioned like a parameter, on the tier of that parameter.
create — New units for parameters that are about to be partitioned, with memory for their shards and gradients.
fetch — The whole value of a unit that lives off the device, for eager code of a single process, within the caps.
gather_rows — Lookups in a tiled parameter: its rows, from the ranks and tiers that have them.
nvme_gradient_pool — Space on drives for gradients, reserved for a row of units at a time.
nvme_shards — Shards of a row of units on drives, each in pieces.
offloaded_gradient — Gradients that live off their device, and changes of them that are made when they are next read.
own_shards — A mark beside one rank's states, for savers that take what has the same name on all ranks for copies of one
    value.
pending_updates — Updates of shards that a deferred step makes beside the next forward.
placed — What a unit's placement says of its gradient, and of full copies of it.
recut — Units that no graph has used yet, cut into other tiles.
saving — A save in the background, as those see it who change what it has still to write.
shard_changes — In-place changes of a shard, piece by piece, that mark it incomplete when they end in their middle.
shard_layout — The layout of a unit in memory, and its cut into spans of which each rank has a part.
shard_values — Access to this rank's shard of a tensor that is partitioned like a parameter, piece by piece.
steps_taken — The optimizer steps of units: noted at each step, added up where ranks compare them.
swap — Hops of a unit's shard to its device, and of a gradient to its tier, as a schedule asks for them.
tiled_gradient — The gradient of a unit that is computed, reduced and offloaded tile by tile.
twin — A copy of a partitioned parameter, partitioned alike: each rank copies its own shard, and sends nothing.
unit — A partitioned parameter on one rank: its shard, its tiles, and its whole value.
updatable — What a step has still to do to a unit, and whether the unit's values are all of one step.
whole — A unit's shards to its flat whole and back, in one call on the lane of gathers. Collective operations.
whole_gradient — Full gradients that a rank keeps until the step: those of further backwards are added to them, and then
    they are reduced, once.
whole_unit — A whole parameter as a unit: how its optimizer states are laid out over the ranks, while its value stays whole
    on each.
"""
