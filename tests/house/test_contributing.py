"""The worked example of CONTRIBUTING is a method: it builds, runs, and is as short as promised."""

import re
from pathlib import Path

import pytest

from offdrift.loss import policy_loss
from offdrift.methods import METHODS, Method, sequences
from tests.oracles.fixtures import fx_a

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def example() -> tuple[str, Method, str]:
    (code,) = re.findall(r"```python\n(ROWS\[.*?)```", TEXT, re.S)
    (name,) = re.findall(r'ROWS\["(\w+)"\]', code)
    room = {**vars(sequences), "ROWS": {}}  # what that file has imported, and nothing more
    exec(compile(code, "CONTRIBUTING.md", "exec"), room)
    return name, room["ROWS"][name], code


def test_it_is_one_row_of_at_most_ten_lines(example):
    name, row, code = example
    assert len(code.strip().splitlines()) <= 10
    assert name not in METHODS
    assert row.describe().count("keep if") == 2


def test_it_runs_and_each_of_its_parts_acts(example):
    _, row, _ = example
    lp, advantages, leaf = fx_a()
    result = policy_loss(lp, row, advantages)
    result.loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    two_sided, one_sided = result.corrected.rejected_by.values()
    assert two_sided.all(), "geometric means 0.894 and 0.911 leave [0.99, 1.01]"
    assert not one_sided.any(), "geometric means of w are above 0.6"
    assert not result.corrected.keep.any()
    assert result.loss.item() == 0.0
