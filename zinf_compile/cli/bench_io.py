"""`zinf bench-io DIR`: measures a drive's bandwidth, in bursts and sustained, through the I/O engine that training uses."""

from __future__ import annotations

import argparse
import collections
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from tabulate import tabulate

from zinf_compile.errors import OptionError
from zinf_compile.ir.sizes import parse_bytes
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.storage.engine import Engine, File, Request
from zinf_compile.runtime.storage.scratch_file import ScratchFile
from zinf_compile.runtime.system.filesystem import look_up

MODES = ("write", "read", "both")
_FILL_BLOCK, _FILL_DEPTH = 4 << 20, 16


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "bench-io",
        help="measure the read and write bandwidth of a folder's drive",
        description="Write, read, and do both at once, in an unnamed temporary file: in bursts, by block size and depth; then "
        "sustained, with the fastest settings.",
    )
    parser.add_argument("folder", metavar="DIR", help="a folder on the drive")
    parser.add_argument(
        "--size",
        metavar="BYTES",
        type=_bytes,
        default="4GiB",
        help="size of the file; larger than the drive's caches (default 4GiB)",
    )
    parser.add_argument("--burst", metavar="BYTES", type=_bytes, default="256MiB", help="bytes of a burst (default 256MiB)")
    parser.add_argument(
        "--seconds", metavar="S", type=_seconds, default=10.0, help="duration of each sustained transfer (default 10)"
    )
    parser.add_argument(
        "--block", metavar="BYTES", type=_bytes, nargs="+", default=[1 << 18, 1 << 20, 1 << 22], help="default: 256KiB 1MiB 4MiB"
    )
    parser.add_argument("--depth", metavar="N", type=_count, nargs="+", default=[4, 32], help="blocks in flight (default 4 32)")
    parser.add_argument("--engine", choices=["auto", "io_uring", "threads"], default="auto", help="default: auto")
    parser.add_argument("--json", action="store_true", help="for programs; keys: see zinf_compile/cli/bench_io.py")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the command's output."""
    found = measure(
        options.folder,
        size=options.size,
        burst=options.burst,
        seconds=options.seconds,
        blocks=options.block,
        depths=options.depth,
        engine=options.engine,
    )
    if options.json:
        return json.dumps(found, indent=2)
    place, chosen = found["filesystem"], found["engine"]
    lines = [
        f"{options.folder}: {place['kind']} on {place['source']}, alignment {place['alignment']}, direct I/O: {place['direct']}",
        f"engine: {chosen['name']}{' (' + chosen['reason'] + ')' if chosen['reason'] else ''}",
    ]
    rows = [
        [kind, case["mode"], f"{case['block'] >> 10:,} KiB", case["depth"], f"{case['bytes_per_s'] / 1e9:.2f}"]
        for kind in ("burst", "sustained")
        for case in found[kind]
    ]
    return "\n".join([*lines, tabulate(rows, ["", "mode", "block", "depth", "GB/s"], disable_numparse=True)])


def measure(
    folder: str, *, size: int, burst: int, seconds: float, blocks: Sequence[int], depths: Sequence[int], engine: str = "auto"
) -> dict[str, Any]:
    """Measure the drive under `folder`; return the object that `--json` prints.

    Keys are added in later versions, never renamed. Sizes are in bytes; rates of "both" are those of reads and writes together.

        filesystem  kind, source, mount_point, direct, alignment, concern (why it is no drive; empty if it is), free
        engine      name, reason (why not io_uring; empty if it is or was not asked for)
        burst       for each mode, block and depth: mode (write, read, both), block, depth, bytes_per_s
        sustained   the same for each mode at its best block and depth: the rate of the second half of the time
    """
    size -= size % (2 * max(blocks))
    if odd := [block for block in blocks if block % 4096]:
        raise OptionError(f"--block {odd[0]} is no block size; accepted: multiples of 4096, as direct I/O requires")
    if not size:
        raise OptionError(f"--size is less than two blocks of {max(blocks):,} bytes; accepted: a larger one, or smaller blocks")
    if max(blocks) * max(depths) > size:
        raise OptionError(
            f"--depth {max(depths):,} blocks of {max(blocks):,} bytes at a time are more than --size, {size:,} bytes; accepted: "
            "fewer or smaller ones, or a larger size"
        )
    with closing(ScratchFile(folder)) as scratch:
        place = look_up(folder)
        scratch.reserve(size)
        filled = Case(scratch.file, size, "write", _least(_FILL_BLOCK, size), _FILL_DEPTH, engine=engine)
        filled.rate(lambda moved, _: moved >= size)
        cases = [Case(scratch.file, size, m, b, d, engine=engine) for m in MODES for b in blocks for d in depths]
        bursts = [(case.rate(lambda moved, _: moved >= burst), case) for case in cases]
        best = [max((pair for pair in bursts if pair[1].mode == mode), key=lambda pair: pair[0])[1] for mode in MODES]
        sustained = [(case.rate(lambda _, passed: passed >= seconds, skip=seconds / 2), case) for case in best]
        return {
            "filesystem": {
                "kind": place.kind,
                "source": place.source,
                "mount_point": place.mount_point,
                "direct": scratch.file.direct,
                "alignment": scratch.file.alignment,
                "concern": place.concern,
                "free": place.free_bytes,
            },
            "engine": filled.chosen,
            "burst": [case.report(rate) for rate, case in bursts],
            "sustained": [case.report(rate) for rate, case in sustained],
        }


class Case:
    """Transfers of one mode: `depth` blocks at a time, over the file in a loop; mode "both": each direction in its own half."""

    def __init__(self, file: File, size: int, mode: str, block: int, depth: int, *, engine: str) -> None:
        self.mode = mode
        self.chosen: dict[str, str] = {}
        self._file = file
        self._size = size
        self._block = block
        self._depth = depth
        self._engine = engine

    def rate(self, enough: Callable[[int, float], bool], *, skip: float = 0.0) -> float:
        """Transfer until `enough(bytes, seconds)`; return bytes per second of the transfers that ended after `skip` seconds."""
        buffers = aligned_buffer(self._block * self._depth).split(self._block)
        under_way: collections.deque[Request] = collections.deque()
        with closing(Engine(self._engine, depth=self._depth, chunk_bytes=self._block)) as engine:
            self.chosen = {"name": engine.name, "reason": engine.reason}
            begin = skipped_at = time.perf_counter()
            submitted = ended = skipped = 0
            while True:
                passed = time.perf_counter() - begin
                if passed < skip:
                    skipped, skipped_at = ended, begin + passed
                if len(under_way) < self._depth and not enough(submitted * self._block, passed):
                    write, offset = self.request(submitted)
                    transfer = engine.write if write else engine.read
                    under_way.append(transfer(self._file, offset, buffers[submitted % self._depth]))
                    submitted += 1
                elif under_way:
                    under_way.popleft().wait()
                    ended += 1
                else:
                    break
            return (ended - skipped) * self._block / (time.perf_counter() - skipped_at)

    def report(self, rate: float) -> dict[str, Any]:
        """Return the case as its JSON object."""
        return {"mode": self.mode, "block": self._block, "depth": self._depth, "bytes_per_s": rate}

    def request(self, number: int) -> tuple[bool, int]:
        """Return (is a write, offset) of a transfer, given its number."""
        if self.mode != "both":
            return self.mode == "write", number * self._block % self._size
        half = self._size // 2
        return bool(number % 2), number // 2 * self._block % half + number % 2 * half


def _least(block: int, size: int) -> int:
    """Return the largest power of two, at most `block`, that `size` is a multiple of."""
    while size % block:
        block //= 2
    return block


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text, option="size")
    except OptionError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; accepted: bytes, or text such as 64MiB") from error


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,7}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of blocks; accepted: 1 to 9,999,999")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; accepted: more than 0, such as 0.5 or 10")
    return value
