"""The filesystem under a path: its type, its free space, and whether it is a local drive."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_LAYERED = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
_REMOTE = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "beegfs_nodev",
        "pvfs2",
        "glusterfs",
        "afs",
        "9p",
    }
    | {"virtiofs", "wekafs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.gcsfuse"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filesystem:
    """A mounted filesystem, as seen from one folder on it."""

    path: str
    kind: str
    """As in /proc/mounts: `ext4`, `xfs`, ...; empty where the kernel doesn't say."""
    source: str
    """The block device, or what else is mounted."""
    mount_point: str
    options: str
    free_bytes: int
    """Left for this user."""
    total_bytes: int

    @property
    def concern(self) -> str:
        """A warning about states kept here, where this is no local drive; else empty."""
        if self.kind in _IN_MEMORY:
            return f"{self.kind} is memory: what is moved there frees none, and counts against the memory limit"
        if self.kind in _LAYERED:
            return f"{self.kind} is a container's own layer: often small and slow; mount a volume of a local drive there"
        if self.kind in _REMOTE:
            return f"{self.kind} is reached over a network or from the host: each step waits for it, and others share it"
        return ""


def look_up(path: str | os.PathLike[str]) -> Filesystem:
    """Describe the filesystem that holds the folder `path`; raise OSError, as `os.open` does, where there is none.

    The mount is found by its number, since the device number of a file names no mount on btrfs and overlayfs.
    """
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        space = os.fstatvfs(fd)
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as facts, open("/proc/self/mountinfo", encoding="utf-8") as mounts:
            number = next((line.split()[1] for line in facts if line.startswith("mnt_id:")), "")
            kind, source, mount_point, options = _find_mount(mounts, number)
    finally:
        os.close(fd)
    return Filesystem(
        path=os.fspath(path),
        kind=kind,
        source=source,
        mount_point=mount_point,
        options=options,
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
    )


def _find_mount(lines: Iterable[str], number: str) -> tuple[str, str, str, str]:
    """Find a mount in the lines of /proc/self/mountinfo; return its type, source, mount point and options."""
    for line in lines:
        mount, _, filesystem = line.partition(" - ")
        fields, (kind, source, *_) = mount.split(), filesystem.split()
        if fields[0] == number:
            return kind, _unescape(source), _unescape(fields[4]), fields[5]
    return "", "", "", ""


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
