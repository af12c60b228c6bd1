"""Exit statuses: the one table that every command keeps and `offdrift --help` shows."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of a command."""

    FINE = 0
    ERROR = 1
    USAGE = 2
    VERDICT = 3
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.FINE: "fine",
    ExitCode.ERROR: "an error; the message says which",
    ExitCode.USAGE: "invalid command line",
    ExitCode.VERDICT: "the verdict reached the level asked for "
    "(check --max-kl, audit --fail-on, watch --fail-on, methods --check, lab bounds, lab coverage, lab three-policies)",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C)",
}


def exit_codes_text(verdict: str | None = MEANINGS[ExitCode.VERDICT]) -> str:
    """The table as one paragraph.

    Args:
        verdict: what status 3 means for one command; None for a command without a verdict.

    Example:
        >>> exit_codes_text(None)[:50]
        '0 fine · 1 an error; the message says which · 2 in'
    """
    meanings = MEANINGS | {ExitCode.VERDICT: verdict}
    return " · ".join(f"{int(code)} {words}" for code, words in meanings.items() if words)
