"""Collectives, and what ranks compare with each other.

collectives — Shards to full units and gradients to shards, for several units at once, straight into the buffers that
    compute uses.
steps_done — The optimizer steps that the shards of units went through, as the ranks compare them.
"""
