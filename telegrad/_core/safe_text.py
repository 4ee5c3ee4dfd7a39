"""Make text from other processes safe for terminals, logs and pages.

Terminals obey control characters, and bidirectional marks make a line look like another one. Function names, exception
texts, paths and host names from other processes can contain them. They are escaped once: where
`reporting/__init__.py` decodes an answer, and where a record enters the log.
"""

from __future__ import annotations

import logging
import unicodedata


def safe(text: str, lines: bool = False) -> str:
    r"""Return `text` with each character that is neither printable nor a space escaped, such as "\x1b".

    Args:
        text: any text.
        lines: keep the ends of lines and tabs.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each
        if each.isprintable() or each in kept or unicodedata.category(each) == "Zs"
        else each.encode("unicode_escape").decode()
        for each in text
    )


class SafeRecords(logging.Filter):
    """Escape log records. Further lines of a value are indented, because they could look like records of their own."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            args = tuple(map(_indented, record.args))
            if any(new is not old for new, old in zip(args, record.args, strict=True)):
                record.args = args
        text = record.getMessage()
        if not text.isprintable() and (escaped := safe(text, lines=True)) != text:
            record.msg, record.args = escaped, None
        if record.exc_info and not record.exc_text:
            text = _formatter.formatException(record.exc_info)
            if (escaped := safe(text, lines=True)) != text:
                record.exc_text = escaped  # otherwise the program's own formatter formats it
        return True


_formatter = logging.Formatter()


def _indented(value: object) -> object:
    if isinstance(value, str | BaseException):
        text = str(value)
        if "\n" in text:
            return text.replace("\n", "\n  ")
    return value
