"""Drives: the I/O engine, the store of extents over several of them, and checksums of what they return.

block_checksums — Checksums of the store's blocks.
block_io — Reads and writes of single blocks: ordered where they overlap, staged where memory is not aligned, checked at
    arrival.
direct_file — Files opened for the I/O engine: direct (O_DIRECT) where the filesystem allows it, and buffered for what is
    not aligned.
drive_speed — The speed of several drives beside each other, from which their shares of the bytes follow.
engine — Asynchronous file I/O: an engine that reads and writes memory in place, by io_uring or by threads.
extent_store — The store: named extents on one drive or several, read and written asynchronously, checked at every read.
extents — The layout of extents: blocks, dealt out over one file per device.
file_read — Reads of file ranges into host memory: from the page cache where they are in it, else past it from the drive.
mapped_file — Memory mapped from a file: the kernel may take it back at any time, since the bytes are on the drive too.
scratch_file — Files without a name: the kernel frees them when the last process that holds them ends, however it ends.
stalls — Time-outs of drives: a warning after some seconds without any progress of an engine, an error after its time-out.
stores — The stores of tiers that are not memory: one row for each kind of drive.
value_space — Space on drives for saved values: an extent for each, from the forward to the end of its backward.
"""
