"""Drives: the I/O engine, the store of extents over several of them, and checksums of what they return.

block_checksums — What each block must contain, kept in memory, so that what a drive returns is never taken on trust.
block_io — Blocks on their way: in order where they meet, staged where memory is not aligned, checked when they arrive.
direct_file — Files opened for the I/O engine: direct (O_DIRECT) where the filesystem allows it, and buffered for what is
    not aligned.
drive_speed — How fast several drives are beside each other, so that each gets the part of the bytes that it moves in the
    same time.
engine — Asynchronous file I/O: an engine that reads and writes memory in place, by io_uring or by threads.
extent_store — The store: named extents on one drive or several, read and written asynchronously, checked at every read.
extents — Where the bytes of each extent lie: blocks, dealt out over one file per device.
file_read — Stretches of files on their way into memory: from the page cache where they are in it, past it from the drive
    otherwise.
mapped_file — Memory that is a file's: the kernel may take it back at any time, since the bytes are on the drive too.
scratch_file — Files that have no name: the kernel frees them when the last process that holds them ends, however it ends.
stalls — Drives that don't answer: a warning after some seconds without any progress of an engine, an error after its time-
    out.
stores — Which store keeps what lives on a tier that is not memory: one row for each kind of drive.
"""
