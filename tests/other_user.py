"""Act as another user of this host, for tests of attacks by other users."""

import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

NOBODY = 65534  # the id of a user and of a group


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def become_nobody() -> None:
    """Become another user for good; needs root."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def as_nobody(act: Callable[[], object]) -> None:
    """Call `act` in a child process of another user; needs root."""
    pid = os.fork()
    if not pid:
        try:
            become_nobody()
            act()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, "the other user could not do it"


Plant = Callable[[Callable[[], pathlib.Path]], None]


def link_to(target: pathlib.Path, path: pathlib.Path) -> Callable[[], pathlib.Path]:
    def act() -> pathlib.Path:
        path.symlink_to(target)
        return path

    return act


def folder_at(path: pathlib.Path, rights: int) -> Callable[[], pathlib.Path]:
    def act() -> pathlib.Path:
        path.mkdir()
        path.chmod(rights)
        return path

    return act


def file_at(path: pathlib.Path) -> Callable[[], pathlib.Path]:
    def act() -> pathlib.Path:
        path.touch()
        return path

    return act


@pytest.fixture
def shared() -> Iterator[pathlib.Path]:
    """Make a folder like /tmp: all users may write, and each may remove only own files."""
    folder = pathlib.Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Return a function that makes another user create a file, at the path that its argument returns.

    Without root, this user creates the file, and the module takes it for that of another user.
    """

    def made(act: Callable[[], pathlib.Path]) -> None:
        if is_root():
            as_nobody(act)
            return
        from telegrad._core import private_files

        planted = os.lstat(act())
        owner, key = private_files._owner, (planted.st_dev, planted.st_ino)
        monkeypatch.setattr(
            private_files, "_owner", lambda found: NOBODY if (found.st_dev, found.st_ino) == key else owner(found)
        )

    return made
