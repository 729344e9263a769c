"""Models that fit nowhere whole: given their values one module at a time, straight into shards.

deferred_fills — Deferred random fills: made when the value is read, or while it is written to a drive, each rank its
    own pieces.
from_checkpoint — A checkpoint's values into a model that is being partitioned: of each parameter, each rank reads its own
    range.
from_meta — Models that fit nowhere whole: made on the meta device, given their values one module at a time, straight into
    shards.
initializers — Initialisers of a model's modules, in the order in which building it runs them.
load — `zinf_compile.load`: a checkpoint onto a model that is partitioned, whole or on meta.
materializer — Whole values of parameters that are being materialized: those of one module at a time are in memory.
materializing — A parameter that is being materialized: hollow, but initialisers may read and write it.
meta_buffers — Buffers of a model on meta, made real for initialisers to fill, and put back where something fails.
mt19937 — States of PyTorch's generator on the CPU, MT19937: the one after any number of draws, found without drawing.
onto_meta — A model on meta that a checkpoint is about to be loaded onto: partitioned first, by the options that it was
    compiled with.
parallel_random — `normal_` and `uniform_` on the CPU with the numbers that PyTorch draws, any range of a tensor by itself.
shard_writer — Shards that go to a drive piece by piece, each made while those before it are written.
spill_file — A file on a drive that values are written to while their number isn't known, and a parameter's values in it.
value_stores — Stores of parameters' values until these are partitioned: their unit, or host memory for now.
while_building — Models that code builds on the CPU in its own way, partitioned while it builds them.
"""
