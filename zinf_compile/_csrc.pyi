"""The native part of zinf-compile: what its I/O engine asks of the kernel."""

from os import PathLike
from typing import final

@final
class IoUringSupport:
    """Whether this process may use io_uring, and if not, why."""

    @property
    def available(self) -> bool:
        """True if a ring could be set up."""

    @property
    def errno(self) -> int:
        """The error of io_uring_setup, 0 if available."""

    @property
    def reason(self) -> str:
        """What the error means and what to do, empty if available."""

@final
class DirectIoAlignment:
    """What direct I/O on a file asks for, in bytes; 0 where it doesn't say."""

    @property
    def memory(self) -> int:
        """Alignment of the buffer's address."""

    @property
    def offset(self) -> int:
        """Alignment of the file offset and of the length."""

def io_uring_support() -> IoUringSupport:
    """Set up the smallest io_uring and close it again, to see whether this process may."""

def direct_io_alignment(path: str | bytes | PathLike[str] | PathLike[bytes]) -> DirectIoAlignment:
    """Ask the filesystem how direct I/O on `path` must be aligned. Raises OSError with errno and path."""
