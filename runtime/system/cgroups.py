"""The limits that a container or a batch system puts on this process, by control groups of version 1 or 2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_FILES = {
    "memory": ("memory.max", "memory.high", "memory.swap.max", "memory.limit_in_bytes"),
    "cpu": ("cpu.max", "cpu.cfs_quota_us"),
    "io": ("io.max", "io.latency"),
    "blkio": (
        "blkio.throttle.read_bps_device",
        "blkio.throttle.write_bps_device",
        "blkio.throttle.read_iops_device",
        "blkio.throttle.write_iops_device",
    ),
}
"""Files of limits by controller, of both versions."""
_USE = {
    "memory.max": ("memory.current", "inactive_file"),
    "memory.high": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}
"""Of each limit of memory: the file that says what is in use, and the line of memory.stat that says what of it is easily had."""
_NO_LIMIT = 1 << 60
"""Version 1 says "no limit" with the largest multiple of a page."""


def find_limits(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> dict[str, str]:
    """Return the limits in force by the file that sets them; the groups above this process's own limit it too."""
    found: dict[str, str] = {}
    for controllers, folder, top in _groups(proc, root):
        for controller in controllers:
            for name in _FILES.get(controller, ()):
                for level in [folder, *folder.parents]:
                    if level.is_relative_to(top) and (text := _read(level / name)):
                        found[str(level / name)] = text
    return found


def memory_limit_bytes(limits: dict[str, str]) -> int | None:
    """Return the smallest limit of memory among what `find_limits` found; None without one."""
    return min((int(text) for path, text in limits.items() if Path(path).name in _USE), default=None)


def available_memory_bytes(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")
) -> int:
    """Return the host memory that this process could take now: what the machine has, within the limits of its groups."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    least = 1024 * int(fields["MemAvailable"].split()[0])
    for path, text in find_limits(proc, root).items():
        if (file := Path(path)).name in _USE:
            use, reclaimable = _USE[file.name]
            with contextlib.suppress(OSError, ValueError):
                used = int((file.parent / use).read_text())
                stat = dict(line.split() for line in (file.parent / "memory.stat").read_text().splitlines())
                least = min(least, int(text) - used + int(stat.get(reclaimable, 0)))
    return max(least, 0)


def _groups(proc: Path, root: Path) -> Iterator[tuple[tuple[str, ...], Path, Path]]:
    """Yield (controllers, folder of this process's group, top of its hierarchy)."""
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if not names:
                tops = [root / "unified", root]
                controllers: tuple[str, ...] = tuple(_FILES)
            else:
                tops, controllers = [root / names, *(root / name for name in names.split(","))], tuple(names.split(","))
            for top in tops:
                folder = top / path.lstrip("/")
                if top.is_dir():
                    yield controllers, folder if folder.is_dir() else top, top  # a container may see its own group as the top
                    break


def _read(path: Path) -> str:
    """Return what a limit's file says; empty where it limits nothing."""
    try:
        text = path.read_text().strip()
    except OSError:
        return ""
    unlimited = text.startswith("max") or text == "-1" or (text.isdigit() and int(text) >= _NO_LIMIT)
    return "" if unlimited else text
