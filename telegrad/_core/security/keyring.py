"""The shared secrets of a group, where a process finds them, and the files that hold them.

A group has one key, or two while the key is being replaced. A worker authenticates itself with the first key of its
ring, and accepts each key of the ring from others. So a key is rotated without stopping the group: add the new key
after the old one on every host, swap the two, then remove the old one (docs/security.md).

Keys chosen by people can be guessed, and an attacker can test guesses against all data authenticated by a key.
Therefore such a key is stretched by scrypt: each guess costs about as much as joining (50 ms, 16 MiB). Keys made by
`new_key` have 256 random bits and need no stretching; they are recognized by their prefix.

The first of these that is set gives the key, which proves that a process belongs to the group:

    key=... in the options     a key, or False for a group without one
    TELEGRAD_KEY               a key
    TELEGRAD_KEY_FILE          a file with a key; with a second line while the key is being replaced
    the user's own key file    `key` in the user's state folder, made by the first process that needs it

Therefore processes that one user starts separately, on one host or on hosts with a shared home, have the same key
without configuration. Neither the key nor data derived only from it is ever put into the rendezvous store.

A file that holds a secret must be protected: other users of the host can neither read nor write it, nor replace it by
another file. They cannot replace it if each folder on its path, including folders that hold a symlink of it, belongs to
this user or to root, and no other user may write it. In a world-writable sticky folder, such as /tmp, others cannot
replace files of this user.

A group may read the file, or write a folder, if the group contains no other user. The group may be root's, if the file
is root's as well; or unknown to the host, such as the `fsGroup` of a pod; or known, and without other users. Servers
such as LDAP need not list the users of a group. So on hosts that query one, a known group must have this user's name.
"""

from __future__ import annotations

import codecs
import copy
import errno
import functools
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import struct
import sys
from collections.abc import Mapping, Sequence

from telegrad._core.private_files import UnsafePath, create_once, open_regular, reason, resolved, state_folder
from telegrad.errors import UsageError

log = logging.getLogger("telegrad")

SHORTEST = 16  # bytes of a key
LONGEST_FILE, MOST_KEYS = 1 << 16, 2  # limits of a key file: bytes and keys
_MADE = b"tgk1-"  # prefix of keys made by `new_key`
_MADE_SIZE = len(_MADE) + 43  # 32 random bytes, as base64 for URLs
_MARKED = "begins with a byte order mark, as some editors write it: save it without one (UTF-8, no BOM)"
# Lines that are not a bare key: comments, quoted keys, assignments of a shell or of YAML, PEM. A base64 key may end
# with "=".
_NO_KEY = re.compile(rb"""#|(["']).*\1$|(export\s+)?[A-Za-z_]\w*\s*=\s*[^=\s]|[A-Za-z_]\w*:\s|-----BEGIN """)
_OPEN = hashlib.sha256(b"telegrad: a group without a key").digest()

VARIABLE, FILE_VARIABLE = "TELEGRAD_KEY", "TELEGRAD_KEY_FILE"
FILE = "key"  # in the user's state folder

_POSIX = hasattr(os, "geteuid")
_ACL = "system.posix_acl_access"  # the extended attribute that holds the access control list on Linux
_NO_ACL = (errno.ENODATA, errno.ENOTSUP, errno.ENOSYS) if _POSIX else ()
_HEADER, _ENTRY = 4, "<HHI"  # bytes of its version; the tag, permissions and user or group of each entry
_USER, _OWNING_GROUP, _GROUP, _MASK = 0x02, 0x04, 0x08, 0x10  # tags
_DATABASES = "/etc/nsswitch.conf"  # the configuration of glibc's lookup of users and groups
_NAMES = ("passwd", "group", "initgroups")  # its lines for users and groups
_LOCAL = {"files", "altfiles", "systemd"}  # the sources that list all their entries

Version = tuple[int, int, int]  # of a file
Key = str | bytes | bool | None  # as users give it; of the two bool only False is valid


def new_key() -> bytes:
    """Return a new random key of printable characters."""
    return _MADE + secrets.token_urlsafe(32).encode()


def check_key(key: object, source: str) -> bytes:
    """Return the key as bytes without surrounding white space; `source` names in errors the place where it was given.

    Raises:
        UsageError: it is no str or bytes, is text that UTF-8 cannot encode, begins with a byte order mark, is shorter
            than 16 bytes, or is not a single line that contains only a key.
    """
    if isinstance(key, str):
        if key.startswith("\ufeff"):
            raise UsageError(f"{source} {_MARKED}")
        try:
            key = key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise UsageError(f"{source} has characters that UTF-8 cannot encode: give bytes, or other text") from None
    if not isinstance(key, bytes):
        raise UsageError(
            f"{source} must be a str or bytes of at least {SHORTEST} bytes, or False for a group without a key, "
            f"not {type(key).__name__}"
        )
    key = key.strip()
    # A key of random bytes may look like anything and contain line breaks, so only text is checked.
    if key.isascii() and _NO_KEY.match(key):
        raise UsageError(
            f"{source} looks like a comment, an assignment or a key within quotes: a key must be alone on its line"
        )
    if key.isascii() and (b"\n" in key or b"\r" in key):
        raise UsageError(f"{source} has several lines: a key is a single line, so give one of them")
    if len(key) < SHORTEST:
        raise UsageError(
            f"{source} has {len(key)} bytes: a group's key needs at least {SHORTEST}, so that it cannot be guessed. "
            'Make one with: python -c "import secrets; print(secrets.token_urlsafe(32))"'
        )
    return key


class Keyring:
    def __init__(self, keys: Sequence[bytes], path: str = "", is_open: bool = False) -> None:
        """`path` is the file of the keys, if any, which is read again after changes; `is_open`: there is no key."""
        self.is_open = is_open
        self.group = ""  # the only group for which derived keys are valid
        self._path = path
        # The version of the file, and its keys; replaced as a whole, as threads may read the file at the same time. The
        # version is unknown at first, although the keys come from the file: it may have been replaced since it was
        # read. So the first use reads it again.
        self._read: tuple[Version | None, tuple[bytes, ...]] = None, (_OPEN,) if is_open else (*map(_stretch, keys),)

    @property
    def may_change(self) -> bool:
        """Return True if the keys come from a file, which is read again after changes."""
        return bool(self._path)

    def secrets(self) -> tuple[bytes, ...]:
        """Return 32 bytes for each key; the first authenticates this worker."""
        # Keys are replaced while the group runs, so each handshake looks whether the file has changed, without reading
        # it. A file that is missing for a moment changes nothing. The version is taken before the content is read: if
        # the file is replaced between the two, the next handshake reads it again. It is stored even if the content is
        # refused, so that this is logged once for each change and not for each handshake.
        known, secrets = self._read
        version = _version_of(self._path) if self._path else known
        if version is not None and version != known:
            try:
                secrets = tuple(map(_stretch, read_keys(self._path)))
            # The file may be incomplete while it is written, which must not stop a running group.
            except UsageError as error:
                log.warning("telegrad: the previous keys stay in use until the key file changes again: %s", error)
            self._read = version, secrets
        return secrets

    def derive(self, purpose: bytes) -> tuple[bytes, ...]:
        """Return 32 bytes for each key, valid for this purpose only; the first authenticates this worker."""
        context = b"telegrad " + purpose + b" in " + self.group.encode()
        return tuple(hmac.digest(secret, context, "sha256") for secret in self.secrets())

    def within(self, group: str) -> Keyring:
        """Return the same keys, with derived keys that are valid for this group only."""
        ring = copy.copy(self)
        ring.group = group
        return ring


def open_ring() -> Keyring:
    """Return the ring of a group without a key: connections are encrypted, but anyone can connect."""
    return Keyring((), is_open=True)


def read_keys(path: str, setting: str = "") -> list[bytes]:
    """Return the keys in a file, one per line; `setting` names in errors the setting that gave the path. Raise
    UsageError if the file cannot be read, others may read or write it, it has over two keys, or one cannot be used."""
    file = f"the key file {path!r}{f' that {setting} names' if setting else ''}"
    try:
        data = read_secret(path, LONGEST_FILE)
    except OSError as error:
        raise UsageError(f"{file} cannot be used: {reason(error)}") from None
    if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsageError(f"{file} {_MARKED}")
    lines = [line.strip() for line in data.split(b"\n")]
    keys = [check_key(line, f"{file}, line {number},") for number, line in enumerate(lines, 1) if line]
    if len(keys) > MOST_KEYS:
        raise UsageError(
            f"{file} has more than {MOST_KEYS} keys: it may have one, and a second on the next line while the key is "
            "replaced. Remove the others"
        )
    if not keys:
        raise UsageError(f"{file} is empty: write a key of at least {SHORTEST} bytes into it")
    return keys


@functools.lru_cache(maxsize=16)
def _stretch(key: bytes) -> bytes:
    if key.startswith(_MADE) and len(key) == _MADE_SIZE:
        return hashlib.sha256(key).digest()
    # The salt is the same for all groups. One from the store would be under the control of an attacker who can write
    # there, and the place of the store is no salt either, because workers name it in different ways
    # (docs/decisions/keys.md).
    return hashlib.scrypt(key, salt=b"telegrad", n=1 << 14, r=8, p=1, dklen=32)


def _version_of(path: str) -> Version | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def find_keys(given: Key = None, environment: Mapping[str, str] = os.environ) -> Keyring:
    """Return the keys to use for the option `given`; raise UsageError if there is none, or if one cannot be used."""
    found = given_keys(given, environment)
    return found if found is not None else user_keys()


def given_keys(given: Key = None, environment: Mapping[str, str] = os.environ) -> Keyring | None:
    """Return the keys given by the program or its environment, or None; raise UsageError if one cannot be used."""
    if given is False:
        log.warning(
            "telegrad: key=False: this group has no key. Anyone who reaches its workers can run code as their users"
        )
        return open_ring()
    if given is not None:
        return Keyring([check_key(given, "the option key")])
    keys, path = of_environment(environment)
    return Keyring(keys, path) if keys else None


def of_environment(environment: Mapping[str, str] = os.environ) -> tuple[list[bytes], str]:
    """Return the keys given by the environment, and their file if they are in one; without keys, both are empty.

    Programs that make their own key call this as well: an invalid setting is a UsageError in each of them.
    """
    if VARIABLE in environment:
        return [check_key(environment[VARIABLE], VARIABLE)], ""
    path = environment.get(FILE_VARIABLE)
    if path is None:
        return [], ""
    if not path:
        raise UsageError(f"{FILE_VARIABLE} is empty: give the path of the file that holds the group's key, or unset it")
    return read_keys(path, FILE_VARIABLE), path


def user_keys() -> Keyring:
    """Return the keys in this user's own file, which is created if missing; raise UsageError if it is not safe."""
    try:
        path = str(state_folder() / FILE)
        create_once(path, new_key() + b"\n")
    except UsageError as error:
        raise UsageError(
            f"no key is given, and this user's own key file cannot be used: {error}. Correct that, or give all workers "
            f"the same key of at least 16 bytes in {VARIABLE}, in a file that {FILE_VARIABLE} names, or by key=...; "
            "key=False makes a group without a key, in which anyone who reaches a worker can run code"
        ) from None
    return Keyring(read_keys(path), path)


# Files that hold secrets


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
