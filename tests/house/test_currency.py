"""The table of the frameworks is written from one file, and a renamed argument of a framework is found."""

import argparse
import ast
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from offdrift.adapters.frameworks import FRAMEWORKS

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
CURRENCY = runpy.run_path(str(PACKAGING / "currency.py"))
ROWS = CURRENCY["recorded"](CURRENCY["VERSIONS"], "framework")
TRAINERS = CURRENCY["recorded"](CURRENCY["VERSIONS"], "trainer")
SIGNATURES = CURRENCY["recorded"](CURRENCY["SIGNATURES"], "function")
COMMITS = runpy.run_path(str(PACKAGING / "upstream.py"))["COMMITS"]


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


SPELLED = {
    "trl": "TRL", "openrlhf": "OpenRLHF", "areal": "AReaL", "skyrl": "SkyRL", "roll": "ROLL", "nemo-rl": "NeMo-RL",
    "trinity": "Trinity-RFT", "rllm": "rLLM", "agentlightning": "agent-lightning", "vllm": "vLLM", "sglang": "SGLang",
    "openpipe-art": "ART",
}  # fmt: skip
RELEASES = {SPELLED.get(row["name"], row["name"]): row["releases"] for row in (*ROWS, *TRAINERS)}
# What another project pins is its own affair.
MENTION = re.compile(
    rf"(?<![\w-])(?<!pins )({'|'.join(map(re.escape, sorted(RELEASES, key=len, reverse=True)))})"
    r"(?:'s)? (?:>= ?|v)?(\d+(?:\.\d+)+)"
)


def test_every_version_that_the_docs_name_is_one_of_the_table() -> None:
    found = [
        (page.name, *mention.groups())
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for mention in MENTION.finditer(page.read_text())
    ]
    assert len(found) > 50
    known = {(name, release) for name, releases in RELEASES.items() for release in releases}
    known |= {(name, release[: at.start()]) for name, release in known for at in re.finditer(r"\.", release)}
    assert [mention for mention in found if mention[1:] not in known] == []


def test_sources_of_every_signature_without_a_wheel_are_fetched() -> None:
    """With a newer wheel of the same function, that one is compared."""
    for name in {row["framework"] for row in SIGNATURES}:
        own = [row for row in SIGNATURES if row["framework"] == name]
        wheels, sources = (CURRENCY["last_of"](own, wheel=wheel) for wheel in (True, False))
        if wheels and (not sources or sources[0]["version"] < wheels[0]["version"]):
            continue
        assert {COMMITS[name][1][: len(row["source"])] for row in sources} == {row["source"] for row in sources}


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


def test_a_changed_order_and_a_dict_of_arguments_are_read() -> None:
    source = "def loss(mask, logp):\n    if mask:\n        more = {'a': 1, 'b': 2, **logp}\n"
    assert CURRENCY["arguments"](source, "more") == ["a", "b"]
    (change,) = CURRENCY["changes"](RECORDED[1:], {"a.py": source})
    assert change.endswith("in another order: mask, logp")


def installed(row: dict[str, Any]) -> str | None:
    """Source that a row of the recorded signatures is of; None where another version or none is installed."""
    package, _, inside = row["file"].partition("/")
    try:
        if row["source"] != "wheel" or version(FRAMEWORKS[row["framework"]].distribution) != row["version"]:
            return None
    except PackageNotFoundError:
        return None
    spec = importlib.util.find_spec(package)
    return (Path(next(iter(spec.submodule_search_locations))) / inside).read_text() if spec else None  # type: ignore


THERE = [(row, text) for row in SIGNATURES if (text := installed(row)) is not None]


@pytest.mark.skipif(not THERE, reason="neither TRL nor verl is installed")
@pytest.mark.parametrize(("row", "text"), THERE, ids=[f"{row['framework']}-{row['name']}" for row, _ in THERE])
def test_a_planted_rename_of_a_recorded_argument_is_found(row: dict[str, Any], text: str) -> None:
    """In the recorded signatures themselves, against the real source."""
    assert list(CURRENCY["changes"]([row], {row["file"]: text})) == []
    renamed = {**row, "arguments": [f"{row['arguments'][0]}_of_old", *row["arguments"][1:]]}
    (said,) = CURRENCY["changes"]([renamed], {row["file"]: text})
    assert said == f"`{row['name']}` has new {row['arguments'][0]} and lost {row['arguments'][0]}_of_old"
    assert ast.parse(text)


def statuses(row: dict[str, Any], signatures: list[dict[str, Any]], **options: Any) -> list[tuple[str, str, int]]:
    given = argparse.Namespace(**{"offline": False, "sources": None, "keep": None, **options})
    return list(CURRENCY["judge"](row, signatures, given))


def test_an_index_out_of_reach_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is asked for real, with nowhere to look."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    ((newest, said, status),) = statuses(ROWS[0], [s for s in SIGNATURES if s["framework"] == ROWS[0]["name"]])
    assert (newest, status) == ("could not be had", 3)
    assert "not compared" in said


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_sources_of_a_commit_are_compared(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path / "peer"), *names, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    row = {"name": "peer", "releases": ["1.0"], "source": "0123abcd", "date": "2026-11-28"}
    signatures = [{**one, "version": "1.0", "source": "0123abcd", "framework": "peer"} for one in RECORDED]
    assert statuses(row, signatures) == [("not published", "recorded 2026-11-28", 0)]
    ((_, said, status),) = statuses(row, signatures, sources=tmp_path)
    assert (said, status) == ("**not compared**", 3)
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "a.py").write_text(SOURCE)
    git("init", "--quiet")
    git("add", "a.py")
    git("commit", "--quiet", "-m", "a")
    commit = git("rev-parse", "--short=9", "HEAD")
    assert statuses(row, signatures, sources=tmp_path) == [(commit, "unchanged", 2)]
    read = {**row, "source": f"wheel; 2.0: {commit}"[7:]}
    assert statuses(read, signatures, sources=tmp_path) == [(commit, "unchanged", 0)]
    (tmp_path / "peer" / "a.py").write_text(SOURCE.replace("mask", "keep"))
    assert statuses(read, signatures, sources=tmp_path) == [(commit, "`loss` has new keep and lost mask", 1)]


def test_a_report_has_the_table_and_the_end_of_the_output(tmp_path: Path) -> None:
    script = "echo '| peer |' > table.md; for i in $(seq 400); do echo line $i; done; exit 3"
    command = ["bash", str(PACKAGING / "report.sh"), "report.md", "sh", "-c", script]
    summary = tmp_path / "summary.md"
    environment = {**os.environ, "GITHUB_STEP_SUMMARY": str(summary)}
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True).returncode == 3
    assert summary.read_text() == (tmp_path / "report.md").read_text()
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("| peer |\n")
    assert "line 400\n```" in report
    assert "line 100\n" not in report
    assert len(report) < 65_536
