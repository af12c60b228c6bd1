"""The table of the frameworks is written from one file, and a renamed argument of a framework is found."""

import runpy
from pathlib import Path

import pytest

from offdrift.adapters.frameworks import FRAMEWORKS

ROOT = Path(__file__).parents[2]
CURRENCY = runpy.run_path(str(ROOT / "packaging" / "currency.py"))
ROWS = CURRENCY["recorded"](CURRENCY["VERSIONS"], "framework")


def test_the_page_has_the_table() -> None:
    assert CURRENCY["PAGE"].read_text() == CURRENCY["page"](), "run `make currency`"


def test_versions_of_the_table_are_those_that_the_adapters_say() -> None:
    assert {row["name"] for row in ROWS} == set(FRAMEWORKS)
    for row in ROWS:
        said = FRAMEWORKS[row["name"]]
        numbers = [tuple(map(int, release.split("."))) for release in row["releases"]]
        assert numbers == sorted(numbers)
        assert (said.oldest in row["releases"] or said.oldest < row["releases"][0], said.tested) == (
            True,
            row["releases"][-1],
        )


@pytest.mark.parametrize("name", ["trl", "verl"])
def test_ranges_in_the_pages_are_those_of_the_table(name: str) -> None:
    (row,) = (row for row in ROWS if row["name"] == name)
    text = (ROOT / "docs" / "integrations" / f"{name}.md").read_text()
    assert all(release in text for release in row["releases"])


SOURCE = """
class Trainer:
    def step(self, model, inputs, *, mode="x", **more): ...

async def loss(logp, mask): ...
"""
RECORDED = [
    {"file": "a.py", "name": "Trainer.step", "arguments": ["model", "inputs", "mode", "**more"]},
    {"file": "a.py", "name": "loss", "arguments": ["logp", "mask"]},
]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "", []),
        ("inputs", "batch", ["`Trainer.step` has new batch and lost inputs"]),
        ("mask)", "mask, use_new_loss=False)", ["`loss` has new use_new_loss"]),
        ("loss(", "policy_loss(", ["`loss` is gone from `a.py`"]),
        ("Trainer:", "Coach:", ["`Trainer.step` is gone from `a.py`"]),
    ],
)
def test_what_a_release_changed_is_said(before: str, after: str, said: list[str]) -> None:
    assert list(CURRENCY["changes"](RECORDED, {"a.py": SOURCE.replace(before, after) if before else SOURCE})) == said
    assert list(CURRENCY["changes"](RECORDED[:1], {})) == ["`a.py` is gone, where `Trainer.step` was"]
