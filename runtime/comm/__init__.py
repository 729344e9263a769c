"""Collectives, and what ranks compare with each other.

collectives — Collectives: shards to full units and gradients to shards, several units at once, straight into the buffers of
    compute.
differences — What ranks do that were to do the same, in words: the first difference, and advice where it has a usual cause.
error_notes — Notes of errors that end one rank, for those that wait for it: in the store through which the process group was
    made.
fingerprint — A hash of a tensor's values, as ranks compare them.
ranks — Exchanges of small values between ranks: comparing, sharing, and failing on all ranks together.
shard_group — The ranks over which a unit is cut into shards, and those with copies of the same shard: a plain value.
shard_ranges — The arithmetic of shards: rank r's contiguous 1/N of a unit, flat, padded to a multiple of N.
steps_done — The optimizer steps that the shards of units went through, as the ranks compare them.
"""
