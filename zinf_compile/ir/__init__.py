"""Plain values that everybody may import: operators, programs, tiles, tiers. Imports nothing of the package but errors and
`_torch`.

chunk_columns — The columns of a chunk of an optimizer's step, and the bytes of a buffer for them.
compute_ops — Operators of compute that PyTorch has none for, `zinf_compute::...`. Inductor runs operators that it doesn't
    know as they are.
compute_shape — The sizes and modes that decide a model's bits, beside its own operators and the types of its states.
formats — How values are represented where they are stored, sent and added up, and how many bytes that takes.
op_spec — One row of the table of operators: all that passes, analyses and the runtime know about an operator that moves
    something.
ops — The intermediate representation: operators that say what moves, and when.
pieces — Pieces of shards, and chunks of pieces of about equal size.
program — What the passes hand to the runtime: a scheduled graph as plain values, free of FX.
row_rounds — How rows of a large parameter are looked up: a part of a tile at a time, so that little is on its way at once.
sizes — Sizes of the buffers that the runtime makes and the memory model counts, and bytes by where they are.
steps — The steps of a program: what the executor performs, one transfer or one region of compute each.
tiers — The tiers that memory and drives form, how a shard gets from one to another, and where the user wants states to
    live.
tiling — Where a large parameter is cut: into boxes that lie in one stretch of memory each, one after the other.
"""
