"""The table of a watch: at 80 columns numbers leave it, and the words of the finding stay."""

import io

import pytest
from rich.console import Console

from offdrift.audit.watch_view import COLUMNS, LiveWatch
from offdrift.show.findings import CAUSES, SIDES

NUMBERS = {"step": 12345, **{name: 1.234e-5 for _, names in COLUMNS for name in names}}
LONG_CAUSE = max(CAUSES.keys() - SIDES.keys(), key=lambda cause: len(CAUSES[cause]))


def finding(cause: str, severity: str = "act") -> dict:
    return {"rule": cause, "cause": cause, "severity": severity, "symptom": "A symptom.", "step": 3}


def table(width: int, rows: dict[str, list[dict]]) -> list[str]:
    """The table alone, below the findings."""
    screen = io.StringIO()
    console = Console(file=screen, width=width, color_system=None)
    live = LiveWatch(console, "run", "offdrift")
    for source, findings in rows.items():
        live.show(source, NUMBERS, findings)
    screen.truncate(0)
    screen.seek(0)
    live.close()
    return screen.getvalue().splitlines()


def test_wide_the_table_has_every_number():
    head, row = table(160, {"log": [finding("stale_engine")]})
    assert head.split() == ["step", "KL", "KL", "max", "chi2", "ESS", "reward", "length", "grad", "norm"]
    assert f"▲ Act: {CAUSES['stale_engine']}" in row


@pytest.mark.parametrize("width", [80, 100, 120])
def test_at_any_width_no_line_breaks_the_words_of_a_finding(width):
    findings = [finding("stale_engine", "watch"), finding("wrong_weights", "stop"), finding("precision", "act")]
    head, row = table(width, {"log": findings})
    assert f"■ Stop: {CAUSES['wrong_weights']}, 2 more" in row
    assert max(map(len, (head, row))) <= width
    assert ("KL" in head) == (width > 80)


def test_at_80_columns_numbers_fit_as_far_as_they_do():
    head, row = table(80, {"log": [finding("stale_engine")]})
    assert CAUSES["stale_engine"] in row
    assert head.split()[:4] == ["step", "KL", "KL", "max"]
    assert "grad" not in head
    assert "…" not in row


def test_what_does_not_fit_at_all_is_folded_and_not_cut():
    lines = table(40, {"a" * 30: [finding(LONG_CAUSE)], "b": []})
    text = " ".join(lines)
    assert [word for word in CAUSES[LONG_CAUSE].split() if word not in text] == []
    assert text.count("a") >= 30
    assert "…" not in text
    assert max(map(len, lines)) <= 40
