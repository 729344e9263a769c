"""Passes over the joint graph, before it is cut into forward and backward.

clone_aliased_outputs — Never hand out memory that belongs to a partitioned parameter.
decompose_kept_ops — Take operators apart that an earlier pass wanted to see whole.
insert_reduce_scatters — Put a reduce-scatter on every parameter gradient of a joint graph.
recompute_unit_views — Keep every form of a gathered weight out of what the forward saves for the backward.
"""
