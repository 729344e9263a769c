"""Passes that act out where saved values live between a forward and its backward. They choose nothing: see `plan/saved_homes`.

_stretches — The compute of a scheduled graph between two transfers, as it is compiled.
fetch_saved_values — Swap saved values in to the device in front of their first use in the backward.
offload_saved_values — Swap saved values out behind their last use in the forward.
"""
