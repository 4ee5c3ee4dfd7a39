"""Files that other users of the host can neither plant nor read."""

from telegrad._core.private_files import (
    Folder,
    UnsafePath,
    create,
    create_once,
    make_folder,
    open_folder,
    open_regular,
    opened,
    private_folder,
    reason,
    replacing,
    resolved,
)
from telegrad._core.security.keyring import read_secret

__all__ = [
    "Folder", "UnsafePath", "create", "create_once", "make_folder", "open_folder", "open_regular", "opened",
    "private_folder", "read_secret", "reason", "replacing", "resolved",
]  # fmt: skip
