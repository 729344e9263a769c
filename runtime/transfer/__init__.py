"""Shards and gradients between tiers.

chunk_buffers — Memory for a few chunks at a time, each a row of columns: a parameter's values, its gradients, its states.
move — One hop of a shard between two tiers, and the hops of a piece between where it lives and where it is updated.
dropped_value — What travels from a forward to its backward in the place of values that the backward makes again.
saved_value — What travels from a forward to its backward in the place of values that leave the device: tensors without bytes.
swap_values — Hops of saved values between the device, host memory and drives, as a schedule asks for them.
value_memory — The memory of saved values on its way from the device and back, hop by hop.
"""
