"""Files and folders of secrets are refused if other users could read or replace them.

The databases of users are made up. Access control lists are those of the file system.
"""

import grp
import os
import pathlib
import pwd
import struct
import sys
from typing import Any

import pytest

from telegrad._core.private_files import UnsafePath
from telegrad._core.security import keyring
from telegrad._core.security.keyring import _others, read_secret

ME, EVE = 1000, 1001
LOCAL, SERVER = "passwd: files [NOTFOUND=return] systemd\ngroup: files  # all\nhosts: dns\n", "passwd: files sss\n"
USERS = [("root", 0, 0), ("sync", 4, 0), ("me", ME, 1000), ("eve", EVE, 200)]


class Host:
    """A host with these users and groups."""

    def __init__(self, path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.users, self.groups, self.hidden = list(USERS), [("root", 0, "")], dict[int, tuple[str, int, str]]()
        self._databases = path / "nsswitch.conf"
        self.use(LOCAL)
        monkeypatch.setattr(os, "geteuid", lambda: ME)
        monkeypatch.setattr(keyring, "_DATABASES", str(self._databases))
        monkeypatch.setattr(pwd, "getpwall", lambda: [self._user(each) for each in self.users])
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: self._user({each[1]: each for each in self.users}[uid]))
        monkeypatch.setattr(grp, "getgrall", lambda: [self._group(each) for each in self.groups])
        known = lambda: {each[1]: each for each in reversed(self.groups)} | self.hidden  # noqa: E731
        monkeypatch.setattr(grp, "getgrgid", lambda gid: self._group(known()[gid]))

    def use(self, databases: str | None) -> None:
        self._databases.unlink(missing_ok=True)
        if databases is not None:
            self._databases.write_text(databases)

    @staticmethod
    def _user(of: tuple[str, int, int]) -> pwd.struct_passwd:
        return pwd.struct_passwd((of[0], "x", of[1], of[2], "", "/", "/bin/sh"))

    @staticmethod
    def _group(of: tuple[str, int, str]) -> grp.struct_group:
        return grp.struct_group((of[0], "x", of[1], of[2].split()))


@pytest.fixture
def host(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def status(mode: int, owner: int, group: int) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, owner, group, 1, 0, 0, 0))


# Groups besides root's; the group of the file; the host's databases; True if only this user is in the group.
GROUPS: list[tuple[list[tuple[str, int, str]], int, str | None, bool]] = [
    ([("me", 1000, "me")], 1000, SERVER, True),
    ([("me", 1000, "")], 1000, SERVER, True),
    ([("me", 1000, "eve")], 1000, SERVER, False),
    ([("me", 1000, "me eve")], 1000, LOCAL, False),
    ([("me", 1000, ""), ("team", 1000, "eve")], 1000, LOCAL, False),  # a second entry with the same number
    ([("team", 1000, "eve"), ("me", 1000, "")], 1000, LOCAL, False),
    ([("me", 200, "")], 200, LOCAL, False),  # the primary group of another user
    ([], 200, LOCAL, False),  # the same group without a name
    ([], 2000, LOCAL, True),  # an unknown fsGroup
    ([], 2000, SERVER, True),
    ([("users", 100, "")], 100, LOCAL, True),  # no other members, as the local database shows
    ([("users", 100, "me")], 100, None, True),  # no nsswitch.conf, as with musl
    ([("users", 100, "")], 100, SERVER, False),  # a server may hide members
    ([("users", 100, "")], 100, "initgroups: files ldap", False),
    ([("users", 100, "")], 100, "group: [ SUCCESS=merge ] nis", False),
    ([("users", 100, "eve")], 100, LOCAL, False),
]


@pytest.mark.parametrize(("groups", "group", "databases", "private"), GROUPS)
def test_a_group_without_other_members_may_read_a_secret_and_write_its_folder(
    groups: list[tuple[str, int, str]],
    group: int,
    databases: str | None,
    private: bool,
    host: Host,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host.groups += groups
    host.use(databases)
    monkeypatch.setattr(sys, "platform", "linux")
    path = tmp_path / "file"
    path.touch()
    path.chmod(0o600)
    for owner in (ME, 0):
        for mode, bits in ((0o440, 6), (0o640, 6), (0o775, 2), (0o2770, 2)):
            assert _others(status(mode, owner, group), str(path), bits) == ("" if private else f"group {group}")
        assert not _others(status(0o755, owner, group), str(path), 2)
        assert not _others(status(0o600, owner, group), str(path), 6)
        assert _others(status(0o604, owner, group), str(path), 6) == "all"


def test_a_server_that_does_not_list_a_group_may_know_it(host: Host, tmp_path: pathlib.Path) -> None:
    host.hidden[300] = ("team", 300, "eve")
    assert _others(status(0o640, ME, 300), str(tmp_path), 6) == "group 300"


def test_a_user_without_a_name(host: Host, tmp_path: pathlib.Path) -> None:
    """Containers may run with a user id that has no entry."""
    del host.users[2]
    host.groups.append(("users", 100, ""))
    for group in (100, 2000):
        assert not _others(status(0o640, ME, group), str(tmp_path), 6)
    assert _others(status(0o640, ME, 200), str(tmp_path), 6) == "group 200"


def test_roots_group_may_read_files_of_root(host: Host, tmp_path: pathlib.Path) -> None:
    assert not _others(status(0o440, 0, 0), str(tmp_path), 6)
    assert _others(status(0o440, ME, 0), str(tmp_path), 6) == "group 0"


# Entries of an access control list: the tag, the permissions, the user or group.
NOBODY = 0xFFFFFFFF
OWNER, GROUP, OTHER = (0x01, 6, NOBODY), (0x04, 0, NOBODY), (0x20, 0, NOBODY)


def mask(permissions: int) -> tuple[int, int, int]:
    return 0x10, permissions, NOBODY


def give(path: pathlib.Path, *entries: tuple[int, int, int]) -> None:
    """Give a file an access control list, if its file system supports it."""
    packed = b"".join(struct.pack("<HHI", *each) for each in sorted(entries, key=lambda each: each[0]))
    try:
        os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + packed)
    except OSError as error:
        pytest.skip(f"this file system has no lists of access control: {error}")


LISTS: list[tuple[list[tuple[int, int, int]], str]] = [
    ([(0x02, 4, 65534), mask(4)], r"user 65534 in its access control list"),
    ([(0x02, 2, 65534), mask(6)], r"user 65534 in its access control list"),
    ([(0x08, 4, 777_777), mask(4)], ""),  # an unknown group
    ([(0x02, 4, 0), (0x02, 6, os.geteuid()), mask(6)], ""),  # as systemd gives credentials to a service
    ([(0x02, 6, 65534), mask(0)], ""),  # the mask removes the permissions
    ([(0x02, 1, 65534), mask(7)], ""),
]


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="Linux alone has them")
@pytest.mark.parametrize(("entries", "whom"), LISTS)
def test_users_and_groups_in_an_access_control_list(
    entries: list[tuple[int, int, int]], whom: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"secret")
    path.chmod(0o600)
    give(path, OWNER, GROUP, OTHER, *entries)
    if whom:
        with pytest.raises(UnsafePath, match=whom):
            read_secret(str(path), 10)
    else:
        assert read_secret(str(path), 10) == b"secret"


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="Linux alone has them")
def test_a_folder_that_another_user_may_write_by_its_access_control_list(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "folder" / "key"
    path.parent.mkdir()
    path.write_bytes(b"secret")
    path.chmod(0o600)
    give(path.parent, (0x01, 7, NOBODY), GROUP, OTHER, (0x02, 5, 65534), mask(7))
    assert read_secret(str(path), 10) == b"secret"
    give(path.parent, (0x01, 7, NOBODY), GROUP, OTHER, (0x02, 7, 65534), mask(7))
    with pytest.raises(UnsafePath, match=r"other users may change it \(user 65534 in .*: run chmod go-w on it"):
        read_secret(str(path), 10)


def owned_by_eve(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another user own a folder, as this process sees it."""
    real = os.stat

    def seen(place: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        found = real(place, *args, **kwargs)
        if place != str(path):
            return found
        return os.stat_result((*found[:4], 54321, *found[5:]))

    monkeypatch.setattr(os, "stat", seen)


@pytest.mark.parametrize("way", ["file", "folder", "link", "link to the folder", "up"])
def test_a_folder_of_another_user_is_refused(way: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is refused even if it only holds a symlink, which that user can replace."""
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    for folder in (theirs / "below", own):
        folder.mkdir(parents=True)
    for file in (theirs / "key", theirs / "below" / "key", own / "key"):
        file.write_bytes(b"secret")
        file.chmod(0o600)
    (theirs / "link").symlink_to(own / "key")
    (theirs / "folder").symlink_to(own)
    (own / "link").symlink_to(theirs / "key")
    path = {
        "file": theirs / "key",
        "folder": theirs / "below" / "key",
        "link": theirs / "link",
        "link to the folder": theirs / "folder" / "key",
        "up": theirs / "below" / ".." / ".." / "own" / "key",
    }[way]
    assert read_secret(str(path), 10) == b"secret"
    owned_by_eve(theirs, monkeypatch)
    with pytest.raises(UnsafePath, match=r"belongs to user 54321, who may put another file there.*theirs"):
        read_secret(str(path), 10)
    with pytest.raises(UnsafePath, match="belongs to user 54321"):
        read_secret(str(own / "link"), 10)
    assert read_secret(str(own / "key"), 10) == b"secret"


def test_a_sticky_folder_that_all_may_write_is_safe(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "sticky" / "key"
    path.parent.mkdir()
    path.write_bytes(b"secret")
    path.chmod(0o600)
    path.parent.chmod(0o1777)
    assert read_secret(str(path), 10) == b"secret"
    path.parent.chmod(0o777)
    with pytest.raises(UnsafePath, match=r"other users may change it \(all\)"):
        read_secret(str(path), 10)


def test_a_volume_of_kubernetes(tmp_path: pathlib.Path) -> None:
    """The volume has a symlink for each file and is sticky; its group has no name in the image, or is root's."""
    made = tmp_path / "volume" / "..2026_11_25"
    made.mkdir(parents=True)
    (made / "key").write_bytes(b"secret")
    (made / "key").chmod(0o440)
    made.parent.chmod(0o1777)
    (made.parent / "..data").symlink_to(made.name)
    (made.parent / "key").symlink_to("..data/key")
    assert read_secret(str(made.parent / "key"), 10) == b"secret"
    if os.geteuid() == 0:
        for each, mode in ((made.parent, 0o3777), (made, 0o2755), (made / "key", 0o440)):
            os.chown(each, 0, 777_777)
            each.chmod(mode)
        assert read_secret(str(made.parent / "key"), 10) == b"secret"
