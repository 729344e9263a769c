"""Disk quotas of this user and group, read from the kernel."""

from __future__ import annotations

import ctypes
import errno
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYS_QUOTACTL_FD = 443
"""System call number on every architecture, since Linux 5.14."""
_GET_QUOTA = 0x800007
_OF = {"user": 0, "group": 1}
_BLOCK_BYTES = 1024
_NONE = frozenset({errno.ESRCH, errno.ENOSYS, errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV, errno.ENOTBLK})
"""Kernel errors that mean that no quota exists."""


class _DiskQuota(ctypes.Structure):
    """struct if_dqblk of <linux/quota.h>."""

    _fields_ = (
        ("hard_limit", ctypes.c_uint64),
        ("soft_limit", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("inode_hard_limit", ctypes.c_uint64),
        ("inode_soft_limit", ctypes.c_uint64),
        ("inodes", ctypes.c_uint64),
        ("block_time", ctypes.c_uint64),
        ("inode_time", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    )


def describe_quota(folder: str, *, of: str) -> str:
    """Return text on the quota of the "user" or "group" on the filesystem of `folder`: bytes used and limit, or "none"."""
    number = os.getuid() if of == "user" else os.getgid()
    quota = _DiskQuota()
    command = ctypes.c_uint((_GET_QUOTA << 8 | _OF[of]) & 0xFFFFFFFF)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        failed = _LIBC.syscall(_SYS_QUOTACTL_FD, fd, command, ctypes.c_int(number), ctypes.byref(quota))
        code = ctypes.get_errno() if failed else 0
    finally:
        os.close(fd)
    if code in _NONE:
        return "none"
    if code:
        return f"unknown ({os.strerror(code)})"
    limit = quota.hard_limit or quota.soft_limit
    return f"{quota.used:,} of {limit * _BLOCK_BYTES:,} bytes used" if limit else "none"
