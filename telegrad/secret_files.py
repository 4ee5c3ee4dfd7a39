"""Tell whether a file that holds a secret, such as a key, is kept from other users of the host.

A group may read the file only if no other user is in it. Databases of users cannot be listed on each host, so four
groups are known to be such: root's, for a file of root (systemd has credentials so); the one that has the name of this
user; one that the host's database does not know, as the `fsGroup` of a pod; and any in a volume that Kubernetes has
made, which is for the processes of that pod.
"""

from __future__ import annotations

import errno
import os
import pathlib
import stat

from telegrad.private_files import UnsafePath, open_regular, resolved

_KUBERNETES = "..data"  # the symlink by which Kubernetes replaces all files of a volume at once


def read_secret(path: str, most: int) -> bytes:
    """Return what is in a file of this user, or of root, that other users can neither read nor change.

    A name that another user has planted may lead to a file of this user whose content all can read, such as one in
    /proc. So no other user may be able to put another file in the place of this one.

    Raises:
        UnsafePath: other users may read or change it or one of the folders above it, or as for `open_regular`.
        OSError: it has more than `most` bytes, or cannot be read.
    """
    real = resolved(path)
    for folder in pathlib.Path(real).parents:
        mode = folder.stat().st_mode
        if hasattr(os, "geteuid") and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UnsafePath(errno.EPERM, "other users may change it: chmod o-w it", str(folder))
    if real.startswith(("/proc/", "/sys/")):
        raise UnsafePath(errno.EPERM, "it is no regular file of a user", real)
    with open_regular(real) as file:
        found, data = os.fstat(file.fileno()), file.read(most + 1)
    if hasattr(os, "getuid"):
        _check(found, real)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has over {most} bytes", real)
    return data


def _check(found: os.stat_result, path: str) -> None:
    if found.st_uid not in (os.getuid(), 0):
        raise UnsafePath(errno.EPERM, f"it belongs to another user (uid {found.st_uid}): make one of your own", path)
    open_to = found.st_mode & 0o066
    if not open_to or (open_to == 0o040 and _is_alone(found, path)):
        return
    mode = stat.S_IMODE(found.st_mode)
    whom = "other users" if mode & 0o006 else f"other users (group {found.st_gid})"
    raise UnsafePath(
        errno.EPERM,
        f"it can be read or written by {whom}, as its mode is {mode:o}: chmod 600 it (in Kubernetes: "
        "defaultMode: 0440)",
        path,
    )


def _is_alone(found: os.stat_result, path: str) -> bool:
    """Return True if no other user is in the group of a file."""
    import grp
    import pwd

    if (found.st_uid == found.st_gid == 0) or os.path.lexists(pathlib.Path(path).parent.parent / _KUBERNETES):
        return True
    try:
        group = grp.getgrgid(found.st_gid)
    except KeyError:
        return True
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == name and not {*group.gr_mem} - {name, "root"}
