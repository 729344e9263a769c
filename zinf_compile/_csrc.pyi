"""The native part of zinf-compile: its I/O engine, what that asks of the kernel, and the state of a generator."""

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
        """The error's meaning and remedy, empty if available."""

@final
class DirectIoAlignment:
    """Alignment that a file requires for direct I/O, in bytes; 0 where it is unknown."""

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

@final
class Outcome:
    """The result of a transfer."""

    @property
    def error(self) -> int:
        """An errno, 0 if every byte was moved."""

    @property
    def ended(self) -> bool:
        """True if the error is that the file ended early."""

    @property
    def failed_at(self) -> int:
        """Where in the file it failed, in bytes."""

    @property
    def moved(self) -> int:
        """Bytes moved."""

    @property
    def checksum(self) -> int:
        """CRC32C of the bytes, if it was asked for and nothing failed."""

    @property
    def began(self) -> float:
        """When the first of it was given to the drive, in seconds of `time.perf_counter`."""

    @property
    def over(self) -> float:
        """When the last of it was over."""

@final
class Counters:
    """Counts of an engine's transfers so far."""

    @property
    def bytes_read(self) -> int:
        """Bytes read, in transfers done or under way."""

    @property
    def bytes_written(self) -> int:
        """Bytes written, in transfers done or under way."""

    @property
    def requests(self) -> int:
        """Transfers submitted."""

    @property
    def in_flight(self) -> int:
        """Transfers that aren't done."""

@final
class Pending:
    """A submitted transfer."""

    @property
    def number(self) -> int:
        """The engine's count of transfers when this one was submitted."""

    def done(self) -> bool:
        """Whether it is over."""

    def wait(self, seconds: float) -> bool:
        """Wait for so long; the GIL is released. Return whether it is over."""

    def outcome(self) -> Outcome:
        """Its result, once it is over."""

@final
class Engine:
    """The asynchronous I/O engine."""

    def __init__(self, engine: str, depth: int, chunk_bytes: int, bandwidth: float) -> None: ...
    @property
    def name(self) -> str:
        """The engine chosen: "io_uring" or "threads"."""

    @property
    def reason(self) -> str:
        """Why io_uring was refused; empty if it wasn't."""

    @property
    def broken(self) -> int:
        """The errno with which io_uring refused to go on: now threads do. 0 if it didn't."""

    @property
    def forked(self) -> bool:
        """True in a forked child of the process that made it."""

    def submit(self, *, write: bool, fd: int, offset: int, address: int, bytes: int, alignment: int, checksum: bool) -> Pending:
        """Start a transfer. The caller keeps memory and descriptor until it is over. Raises ValueError once closed."""

    def take_finished(self) -> list[int]:
        """Numbers of the transfers that finished since the last call."""

    def counters(self) -> Counters:
        """Counts of the transfers so far."""

    def close(self) -> None:
        """Wait for everything submitted, and end."""

def address_of(buffer: memoryview, writable: bool) -> int:
    """The address of a contiguous buffer. Raises BufferError if it can't be given."""

def crc32c_at(address: int, bytes: int, value: int = 0) -> int:
    """The CRC32C of what `value` is the CRC32C of, followed by the bytes at an address."""

def crc32c_combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of two runs of bytes put together, from the CRC32C of each and the second one's length."""

@final
class Mt19937:
    """A state of the generator MT19937."""

    def __init__(self, words: int, used: int) -> None: ...
    def copy(self) -> Mt19937:
        """Return another generator in the same state."""

    @property
    def used(self) -> int:
        """How many of the state's 624 numbers are used up."""

    def write_state(self, words: int) -> None:
        """Write the state as 624 64-bit integers to an address."""

    def skip(self, count: int) -> None:
        """Pass over as many numbers."""
