"""Exit statuses: the one table that every command keeps and `offdrift --help` shows."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    FINE = 0
    ERROR = 1
    USAGE = 2
    VERDICT = 3
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.FINE: "fine",
    ExitCode.ERROR: "an error; the message says which",
    ExitCode.USAGE: "the command line can not be read",
    ExitCode.VERDICT: "the verdict reached the level asked for "
    "(check --max-kl, audit --fail-on, watch --fail-on, lab bounds)",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}


def exit_codes_text() -> str:
    """The table as one paragraph.

    Example:
        >>> exit_codes_text()[:42]
        '0 fine · 1 an error; the message says whic'
    """
    return " · ".join(f"{int(c)} {words}" for c, words in MEANINGS.items())
