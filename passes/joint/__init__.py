"""Passes over the joint graph, before it is partitioned into forward and backward.

align_products — Pad products of 16-bit matrices on a GPU whose rows don't begin at multiples of 16 bytes.
clone_aliased_outputs — Clone outputs that share memory with a partitioned parameter. The backend calls it at capture,
    outside the pipeline.
decompose_kept_ops — Decompose the operators that were kept for `chunk_loss`.
insert_reduce_scatters — Reduce-scatter the gradient of each parameter, on the joint graph.
recompute_unit_views — Keep views and casts of gathered weights out of the values that the forward saves for the backward.
"""
