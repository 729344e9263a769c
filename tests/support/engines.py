"""The I/O engines that this machine has."""

from zinf_compile import _csrc

ENGINES = ["threads", "io_uring"] if _csrc.io_uring_support().available else ["threads"]
