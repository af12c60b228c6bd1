"""docs/your-own-method.md: its files, its commands and what it says that they print."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from tests.command import command
from tests.house.test_docs_code import BLOCKS, COMMANDS

from offdrift.laws.laws import LAWS, MEANT
from offdrift.methods import Method
from offdrift.methods.parts import INPUTS

PASSED = f"all {len(LAWS)} laws hold, or are not asked"
PAGE = "docs/your-own-method.md"
TEXT = (Path(__file__).parents[1] / PAGE).read_text("utf-8")
OURS = [block for block in BLOCKS if block.page == PAGE]
CODE, LOOP, COMPOSED = (block.text for block in OURS if block.language == "python")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The page's files, named as the text before each names them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        CODE.replace("def fall", f"def fall_{tmp_path.name}").replace('"fall"', f'"fall_{tmp_path.name}"')
    )
    for name, block in zip(("mine.toml", "compare.toml"), (b for b in OURS if b.language == "toml"), strict=True):
        assert f"`{name}`" in TEXT
        (tmp_path / name).write_text(block.text)
    return tmp_path


@pytest.mark.slow
def test_every_command_of_the_page_ends_well(folder, monkeypatch, capsys):
    lines = [line for place, line in COMMANDS if place.startswith(PAGE)]
    printed = {}
    for line in lines:
        done = command(monkeypatch, capsys, *shlex.split(line)[1:])
        assert done.code == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        printed[line] = done.stdout
    assert [line.split()[1] for line in lines] == ["methods", "methods", "train", "audit", "sweep"]
    assert PASSED in printed[lines[1]]
    (audit,) = folder.glob("audits/*/audit.json")
    rows = {row["name"]: row for row in json.loads(audit.read_text())["methods"]}
    assert 0 < rows["mine.py:mine"]["kept_tokens"] <= 1
    settings = json.loads((folder / "runs/compare/sweep.json").read_text())["settings"]
    assert [row["arm"] for row in settings] == ["gspo", "token_tis", "trm_max", "mine"]
    head = json.loads((folder / "runs/mine/run.json").read_text())
    assert [source["attribute"] for source in head["code"].values()] == ["mine"]
    assert head["recipe"]["arms"]["mine"]["override"] == {"high": 2.0}


def test_the_loop_runs(folder, capsys):
    exec(compile(LOOP, PAGE, "exec"), {})
    loss, keep = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"tensor\(-?\d\.\d+\)", loss)
    assert keep == "tensor([False, False,  True])"


def test_what_it_composes_are_methods():
    names: dict[str, object] = {}
    exec(compile(COMPOSED, PAGE, "exec"), names)
    assert sum(isinstance(x, Method) for x in names.values()) == COMPOSED.count("od.Method(")


def test_the_failure_that_it_shows_is_the_one_that_is_found(folder, monkeypatch, capsys):
    text = (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(text.replace("* ratio /", "* ratio.detach() * ratio /").replace("fading", "wrong"))
    done = command(monkeypatch, capsys, "methods", "mine.py:mine", "--check", "--json")
    assert done.code == 3
    laws = json.loads(done.stdout)["laws"]
    assert [name for name, law in laws.items() if law["holds"] is False] == ["derivative"]
    shown = " ".join(TEXT.split())
    assert laws["derivative"]["failure"]["words"] in shown
    assert MEANT in shown


def test_its_tables_are_those_of_the_program():
    table = dict(
        re.findall(r"^\| (\w+) \| (.+) \|$", TEXT[TEXT.index("| law |") : TEXT.index("## Train")], re.MULTILINE)
    )
    assert {k: v for k, v in table.items() if k != "law"} == {name: law.meaning for name, law in LAWS.items()}
    assert all(f"`{name}`" in TEXT for name in INPUTS)
