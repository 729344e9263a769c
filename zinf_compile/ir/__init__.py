"""Plain values that everybody may import: operators, programs, tiles, tiers. Imports nothing of the package but errors and
`_torch`.

checkpoint_folder — A folder that was announced for checkpoints, by options `checkpoint` and `checkpoint_keep`.
chunk_columns — The columns of a chunk of an optimizer's step, and the bytes of a buffer for them.
compute_ops — Operators of compute that PyTorch has none for, `zinf_compute::...`. Inductor runs operators that it doesn't
    know as they are.
compute_shape — The sizes and modes that decide a model's bits, beside its own operators and the types of its states.
device_rates — Rates of a device and of its link to host memory, as they were measured on it.
file_digest — A file that ranks must read alike, as they compare it: by its content, since nodes may have it under other names.
formats — Formats of values where they are stored, sent and added up, and the bytes that these take.
forward_compute — The compute of a forward as plain values: what it reads and makes, and what of it runs a second time.
op_spec — Rows of the table of operators: the properties of a transfer operator, read by passes, analyses and the
    runtime.
ops — The intermediate representation: operators for transfers between ranks and between tiers, and their order.
pieces — Pieces of shards, and chunks of pieces of about equal size.
placements — Placements of the parameters of one graph: some of their states may live nearer to the device than those of
    others.
program — Programs: scheduled graphs as plain values, free of FX.
random_states — States of the default random generators of devices, as tensors.
reduce_types — The data types of reductions, as option `reduce_dtype` takes them.
row_rounds — Rounds in which rows of a large parameter are looked up: a part of a tile each, which bounds the bytes in
    transfer.
saved_memory — Memory that a forward saves for its backward, and the tier where it lives meanwhile.
sizes — Sizes of the buffers that the runtime makes and the memory model counts, and bytes by where they are.
steps — The steps of a program: one transfer or one region of compute each, performed by the executor.
tiers — The tiers that memory and drives form, how a shard gets from one to another, and where the user wants states to
    live.
tiling — Tiles of large parameters: boxes that lie in one stretch of memory each, one after the other.
value_spans — The stretch of memory that views of one storage cover: what moves when they do.
value_steps — Steps of values which a forward saves for its backward: moved, dropped and copied.
"""
