"""Check that a file that holds a secret, such as a key, is protected from other users of the host.

A file is protected if other users can neither read nor write it, nor replace it by another file. They cannot replace it
if each folder on its path, including folders that hold a symlink of it, belongs to this user or to root, and no other
user may write it. In a world-writable sticky folder, such as /tmp, others cannot replace files of this user.

A group may read the file, or write a folder, if the group contains no other user. The group may be root's, if the file
is root's as well; or unknown to the host, such as the `fsGroup` of a pod; or known, and without other users. Servers
such as LDAP need not list the users of a group. So on hosts that query one, a known group must have this user's name.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys

from telegrad._core.private_files import UnsafePath, open_regular, resolved

_POSIX = hasattr(os, "geteuid")
_ACL = "system.posix_acl_access"  # the extended attribute that holds the access control list on Linux
_NO_ACL = (errno.ENODATA, errno.ENOTSUP, errno.ENOSYS) if _POSIX else ()
_HEADER, _ENTRY = 4, "<HHI"  # bytes of its version; the tag, permissions and user or group of each entry
_USER, _OWNING_GROUP, _GROUP, _MASK = 0x02, 0x04, 0x08, 0x10  # tags
_DATABASES = "/etc/nsswitch.conf"  # the configuration of glibc's lookup of users and groups
_NAMES = ("passwd", "group", "initgroups")  # its lines for users and groups
_LOCAL = {"files", "altfiles", "systemd"}  # the sources that list all their entries


def read_secret(path: str, most: int) -> bytes:
    """Return the content of a file of this user or of root that other users can neither read, change nor replace.

    A name planted by another user may lead to a world-readable file of this user, such as one in /proc. So such files
    are refused.

    Raises:
        UnsafePath: other users may read or change it or a folder that its path leads through, or as for `open_regular`.
        OSError: it has more than `most` bytes, or cannot be read.
    """
    real = resolved(path, _check_folder if _POSIX else None)
    if real.startswith(("/proc/", "/sys/")):
        raise UnsafePath(errno.EPERM, "it is not a regular file of a user", real)
    with open_regular(real) as file:
        if _POSIX:
            _check_file(file.fileno(), real)
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has over {most} bytes", real)
    return data


def _check_file(descriptor: int, path: str) -> None:
    found = os.fstat(descriptor)
    if found.st_uid not in (os.geteuid(), 0):
        raise UnsafePath(errno.EPERM, f"it belongs to another user (uid {found.st_uid}): create your own", path)
    writers = f"group {found.st_gid}" if _group_bits(found, descriptor) & 0o2 else ""
    if whom := _others(found, descriptor, 0o6) or writers:
        mode = stat.S_IMODE(found.st_mode)
        raise UnsafePath(
            errno.EPERM,
            f"other users ({whom}) can read or write it, as its mode is {mode:o}: "
            f"{'run' if found.st_uid == os.geteuid() else 'have its owner, root, run'} chmod 600 on it (in "
            "Kubernetes: defaultMode: 0440)",
            path,
        )


def _check_folder(path: str) -> None:
    found = os.stat(path)
    # The owner of / can replace all files. It is root, except in user namespaces that do not map the host's root.
    if found.st_uid not in (os.geteuid(), 0, os.stat("/").st_uid):
        raise UnsafePath(
            errno.EPERM,
            f"it belongs to user {found.st_uid}, who may put another file there: use a folder of your own",
            path,
        )
    if not found.st_mode & stat.S_ISVTX and (whom := _others(found, path, 0o2)):
        raise UnsafePath(errno.EPERM, f"other users may change it ({whom}): run chmod go-w on it", path)


def _others(found: os.stat_result, place: int | str, bits: int) -> str:
    """Name other users, except the owner and root, who have one of the permissions `bits` for a file; "" for none.

    `place` is the descriptor of the file, or its path.
    """
    if found.st_mode & bits:
        return "all"
    # With an access control list, the group bits of the mode are its mask. It limits all entries for users and groups,
    # so without a bit in it no entry grants that permission.
    if not found.st_mode >> 3 & bits:
        return ""
    for tag, permissions, number in _access_list(place):
        if not permissions & bits:
            continue
        if tag == _USER and number not in (os.geteuid(), 0):
            return f"user {number} in its access control list"
        if tag == _GROUP and not _is_private(number):
            return f"group {number} in its access control list"
    if _group_bits(found, place) & bits and not (found.st_uid == found.st_gid == 0 or _is_private(found.st_gid)):
        return f"group {found.st_gid}"
    return ""


def _group_bits(found: os.stat_result, place: int | str) -> int:
    listed = [permissions for tag, permissions, _ in _access_list(place) if tag == _OWNING_GROUP]
    return listed[0] if listed else found.st_mode >> 3 & 0o7


def _access_list(place: int | str) -> list[tuple[int, int, int]]:
    """Return tag, permissions within the mask, and user or group of each entry; [] without a list."""
    if not hasattr(os, "getxattr"):
        return []
    try:
        data = os.getxattr(place, _ACL)
    except OSError as error:
        if error.errno in _NO_ACL:
            return []
        raise
    entries = list(struct.iter_unpack(_ENTRY, data[_HEADER:]))
    mask = next((permissions for tag, permissions, _ in entries if tag == _MASK), 0o7)
    return [(tag, permissions & mask, number) for tag, permissions, number in entries]


def _is_private(group: int) -> bool:
    """Return True if a group contains no users except this one and root."""
    import grp
    import pwd

    mine, users = (os.geteuid(), 0), pwd.getpwall()
    try:
        own = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # containers may run with a bare user number
        own = ""
    # A number may have several entries with different members. `getgrgid` returns only the first one, and `getgrall`
    # need not list groups of a server.
    known = [each for each in grp.getgrall() if each.gr_gid == group]
    try:
        known.append(grp.getgrgid(group))  # from a server, which may list no members
    except KeyError:
        pass
    members = {name for each in known for name in each.gr_mem}
    # The second part finds users whose first group this is: the group's own entry does not list them.
    if members - {own, "root"} or any(each.pw_gid == group and each.pw_uid not in mine for each in users):
        return False
    return all(each.gr_name == own for each in known) or _lists_all()


def _lists_all() -> bool:
    """Return True if all users and groups of this host are listed in its local files."""
    try:
        with open_regular(_DATABASES) as file:
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return sys.platform == "linux" and not os.path.lexists(_DATABASES)  # musl reads files only
    databases = [line.partition("#")[0].partition(":") for line in lines]
    sources = {each for name, _, text in databases if name.strip() in _NAMES for each in text.split()}
    return {each for each in sources if not each.startswith("[")} <= _LOCAL  # [NOTFOUND=return] is not a source
