"""Every example runs, and says something."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("0*.py"))
"""The numbered ones; those of an integration are run by its own tests, with the framework."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2
    assert len(path.read_text().splitlines()) <= 100


def test_there_are_examples():
    assert len(EXAMPLES) >= 3
