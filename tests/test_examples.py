"""Every example runs, and says something."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import command

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("0*.py"))
"""The numbered ones; those of an integration are run by its own tests, with the framework."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
    assert len(path.read_text().splitlines()) <= 100


def test_the_first_page_shows_what_the_audit_of_its_log_prints(tmp_path, monkeypatch, capsys):
    """Digits and bars aside, which another processor rounds otherwise; rows of methods are cut."""
    page = (EXAMPLES[0].parents[1] / "docs" / "start.md").read_text("utf-8")
    (shown,) = re.findall(r"```text\n(Detected format.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    script = next(path for path in EXAMPLES if path.name in page and "record" in path.name)
    subprocess.run([sys.executable, str(script), "demo"], check=True, capture_output=True, timeout=120)
    printed = command(monkeypatch, capsys, "audit", "demo/log", width=80).stdout

    def lines(text: str) -> list[str]:
        alike = (re.sub(r"[▁-█]+|\d[\d.,]*(?:e?[-−][\d⁻]+)?", "#", line) for line in text.splitlines())
        return [re.sub(r"\s+|[─╭╮╰╯]+", " ", line).strip() for line in alike]

    expected, real = lines(shown), iter(lines(printed))
    cut = expected.index("... more rows")
    assert all(line in real for line in expected[:cut]), "in this order"
    rest = "\n".join(real)
    assert "\n".join(expected[cut + 1 :]) in rest


def test_there_are_examples():
    assert len(EXAMPLES) >= 3
