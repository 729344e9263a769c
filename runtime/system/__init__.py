"""What the operating system says: allocator, control groups, filesystems, limits.

accelerator — The accelerator of this process: its memory, its names, the methods that move tensors to it.
cgroups — The limits that a container or a batch system puts on this process, by control groups of version 1 or 2.
filesystem — The filesystem under a path: its type, its free space, and whether it is a local drive.
host_limits — The memory that this process may use: of the host, within control groups and rlimits, and of a device.
library_memory — Memory of an accelerator that libraries take at the first matrix products and then keep.
malloc — Settings of glibc's allocator: what is freed goes back to the system where memory is short, and stays where not.
node — The ranks that share this node, and with it its host memory.
page_locked — Host memory that is locked into place, from which an accelerator copies by itself.
process_wide — A register of the collections that belong to the process as a whole, so that `zinf_compile.reset()` empties
    them all.
"""
