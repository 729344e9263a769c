"""Shards and gradients between tiers.

chunk_buffers — Memory for a few chunks at a time, each a row of columns: a parameter's values, its gradients, its states.
move — One hop of a shard between two tiers, and the hops of a piece between where it lives and where it is updated.
swap — One hop of a shard towards its device, or of a gradient's away from it.
tiled_gradient — The gradient of a unit that is computed, reduced and taken away tile by tile.
"""
