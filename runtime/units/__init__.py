"""A parameter's shard on this rank: its layout, its memory on its tier, its tiles and what is still to happen to it.

backing — Where a shard lives that isn't on its device.
companion_memory — Room for tensors that are partitioned like a parameter, on the tier where that parameter lives.
create — New units for parameters that are about to be partitioned, with room for their shards and gradients where these
    will live.
fetch — The whole value of a unit that lives off the device, brought for eager code of a single process, within the caps.
gather_rows — Rows of a tiled parameter, from the ranks and tiers that have them: what an embedding looks up.
nvme_gradient_pool — Room on drives for gradients, laid out for a row of units at a time.
nvme_shards — Shards of a row of units on drives, each in pieces.
offloaded_gradient — Gradients that live off their device: where they go, and what is done to them without bringing them
    back at once.
pending_updates — Updates of shards that are still to come when the next forward asks for them.
pieces — Cut shards into pieces, and put pieces of about equal size together.
shard_changes — Changes of a shard, piece by piece, that may end in their middle.
shard_layout — How a unit lies in memory, and how it is cut into the spans of which each rank has a part.
shard_values — This rank's elements of a tensor that is partitioned like a parameter: where they are, and how to bring them
    piece by piece.
steps_taken — The optimizer steps that units went through: noted at each step, added up where ranks compare them.
swap — One hop of a unit's shard towards its device, or of a gradient's away from it.
tiled_gradient — The gradient of a unit that is computed, reduced and taken away tile by tile.
twin — A copy of a partitioned parameter, partitioned alike: each rank copies its own shard, nothing is sent.
unit — A partitioned parameter, as the runtime knows it: this rank's shard, how to make it whole, and its tiles.
whole — A unit's shards to its flat whole and back, in one call on the lane of gathers. Collective operations.
whole_unit — A whole parameter as a unit: how its optimizer states are laid out over the ranks, while its value stays whole
    on each.
"""
