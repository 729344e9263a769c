"""Passes that act out what becomes of saved values between a forward and its backward: moved, or dropped and made again.

They choose nothing: see `plan/saved_homes` and `plan/recompute`.

carry_values — Give a backward values of its forward that it doesn't have, for compute that is to run again there.
drop_saved_values — Let saved values go at the end of the forward, which the backward makes again.
fetch_saved_values — Swap saved values in to the device in front of their first use in the backward.
offload_saved_values — Swap saved values out behind their last use in the forward.
raise_saved_views — Move views that are saved for the backward up to what they are views of.
remake_saved_values — Make saved values again in the backward that the forward has dropped, by the forward's own compute.
"""
