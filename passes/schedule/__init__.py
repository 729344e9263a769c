"""Passes that write the schedule: gathers, releases, swaps, prefetch.

align_regions — Hang transfers on few cut points, so that the compute between them can be compiled as one.
group_units — Let neighbours in use order move together.
insert_gathers — Gather each partitioned unit in front of the compute that needs it.
insert_releases — Release each gathered unit right after its last use.
insert_row_lookups — Bring the rows that an embedding names, where that moves less than its parameter.
insert_swaps — Bring the shards of units that live off the device in front of their gathers, and take reduced gradients
    away.
merge_gathers — Hold a unit from one use to the next where releasing it in between gains nothing.
narrow_gathers — Move a parameter in the narrower data type in which it is used.
prefetch — Start each gather ahead of its use.
prefetch_swaps — Start each swap ahead of the gather it is for.
sink_unit_views — Take views and casts of parameters where they are used, not earlier.
"""
