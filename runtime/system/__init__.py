"""What the operating system says: allocator, control groups, filesystems, limits.

cgroups — The limits that a container or a batch system puts on this process, by control groups of version 1 or 2.
filesystem — What lies under a path: the filesystem, its free space, and whether it is a drive at all.
host_limits — How much memory this process may really use.
malloc — The C library's allocator: where memory is short, what is freed has to go back.
process_wide — Collections that belong to the process as a whole: each is made here, so that `zinf_compile.reset()` finds
    them all.
"""
