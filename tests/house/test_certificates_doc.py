"""The page on certificates: its snippets run, its commands parse, its links lead somewhere."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offdrift.cli import application
from offdrift.prove.bound import bound_chart
from offdrift_lab.exact.lengths import MEASURED, length_chart, length_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "certificates.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
COMMANDS = [line.split("#")[0].strip() for line in PAGE.splitlines() if line.startswith("    offdrift bound")]


def test_its_snippets_and_commands_are_all_run():
    assert len(SNIPPETS) == 3
    assert len(COMMANDS) == 5


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(application(), shlex.split(command)[1:])
    assert done.exit_code == 0, done.output


def test_its_picture_is_that_of_its_command():
    command = re.search(r"`offdrift (bound [^`]*) --chart bounds.svg`", PAGE)
    assert command is not None
    words = dict(re.findall(r"--([\w-]+) (\S+)", command[1]))
    limits = {name.replace("-", "_"): float(x) for name, x in words.items() if name != "T"}
    chart = bound_chart(horizon=int(words["T"]), reward_range=1.0, constants=("paper", "sharp"), **limits)
    picture = (ROOT / "docs" / "bounds.svg").read_text("utf-8")
    assert [s.name for s in chart.series] == re.findall(r">([^<>]+: [\d.e]+)</text>", picture)
    assert len(picture) < 100_000


def test_the_picture_of_lengths_is_that_of_the_package():
    chart, picture = length_chart(length_rows(MEASURED)), (ROOT / "docs" / "lengths.svg").read_text("utf-8")
    assert [s.name for s in chart.series] == re.findall(r">([^<>]+: [\d,]+ \([\d,]+\))</text>", picture)
    for row in length_rows(MEASURED):
        if row["name"] in ("vLLM bfloat16", "lag 1", "lag 64", "vLLM FP8 cache"):
            assert all(f"{row['passes'][which]:,}" in PAGE for which in ("sharp", "others", "paper"))


def test_the_weights_of_prompts_under_grpo_are_those_of_their_formula():
    table = re.search(r"\| n \| p = .5 .*?\n\n", PAGE, flags=re.S)
    assert table is not None
    head, _, *rows, last = (line.strip("| \n").split(" | ") for line in table[0].strip().splitlines())
    shares = [float(word.removeprefix("p = ")) for word in head[1:]]
    for n, *shown in rows:
        for p, number in zip(shares, shown, strict=True):
            assert number == f"{weight_under_grpo(int(n), p):.2f}", (n, p)
    assert len(rows) == 5
    assert last[1:] == [f"{(p * (1 - p)) ** -0.5:.2f}" for p in shares]


def test_the_table_of_fresh_answers_is_that_of_its_benchmark():
    rows = json.loads((ROOT / "benchmarks" / "results" / "certificate_fresh.json").read_text("utf-8"))["rows"]
    table = PAGE.partition("<!-- The table of fresh answers. -->")[2].partition("<!-- End of the table")[0]
    shown = [line.strip("|").split("|") for line in table.strip().splitlines()[2:]]
    expected = [r for r in rows if r["horizon"] == 128]
    assert len(shown) == len(expected) == 12
    for cells, r in zip(shown, expected, strict=True):
        numbers = [f"{r[k]:.3f}" for k in ("gain", "direct", "fresh")]
        ratio = f"{r['fresh'] / r['direct']:.2f}"
        assert [c.strip() for c in cells] == [str(r["kl"]), f"{r['prompts']:,}", *numbers, ratio]


def test_the_table_of_control_variates_is_that_of_its_benchmark():
    rows = json.loads((ROOT / "benchmarks" / "results" / "certificate_control.json").read_text("utf-8"))["rows"]
    table = PAGE.partition("<!-- The table of control variates. -->")[2].partition("<!-- End of the table")[0]
    shown = [[c.strip() for c in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert len(rows) == 30
    assert shown == [
        [
            *(str(r["kl"]), str(r["horizon"]), f"{r['prompts']:,}", f"{r['gain']:.3f}", f"{r['direct']:.3f}"),
            *(f"{r[k] / r['direct']:.2f}" for k in ("control", "mixed")),
        ]
        for r in rows
    ]


def weight_under_grpo(n: int, p: float) -> float:
    """E[sqrt((n-k-1)(n-1) / (n (k+1))) + sqrt(k (n-1) / (n (n-k)))], k right ones among n - 1 siblings."""
    total = 0.0
    for k in range(n):
        right = math.sqrt((n - k - 1) * (n - 1) / (n * (k + 1)))
        wrong = math.sqrt(k * (n - 1) / (n * (n - k)))
        total += math.comb(n - 1, k) * p**k * (1 - p) ** (n - 1 - k) * (right + wrong)
    return total


def test_its_own_links_lead_to_its_own_sections():
    titles = re.findall(r"^## (.*)$", PAGE, flags=re.M)
    anchors = {title.lower().replace(" ", "-") for title in titles}
    linked = set(re.findall(r"\]\(#([^)]*)\)", PAGE))
    assert linked == anchors
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target
