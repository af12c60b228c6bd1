"""A name that users build on does not disappear unnoticed: docs/api.json has them all."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
API = runpy.run_path(str(ROOT / "docs" / "api.py"))
STORED = json.loads((ROOT / "docs" / "api.json").read_text("utf-8"))


def test_every_promised_name_is_there():
    lost = API["gone"](STORED, API["api"]())
    assert lost == [], (
        "keep these names, or run `python docs/api.py --breaking` and write the way over into CHANGELOG.md"
    )


def test_every_new_name_is_in_the_list():
    assert API["api"]() == STORED, "run `make docs`"


def test_there_is_something_to_lose():
    assert min(map(len, STORED.values())) >= 4
    assert sum(map(len, STORED.values())) > 700
    assert {"train --resume", "sweep --ray", "lab bounds --json"} <= {*STORED["commands"]}
    assert {"lag.sync_every", "arms.NAME.override", "log.checkpoint_every"} <= {*STORED["recipe settings"]}


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        (["f(a, b)"], ["f(a, b, c)"], []),
        (["f(a, b)"], ["f(a, c)"], ["k: f(a, b)"]),
        (["f(a)"], ["g(a)"], ["k: f(a)"]),
        (["A", "B"], ["B"], ["k: A"]),
        (["A"], ["A(x)"], []),
    ],
)
def test_what_counts_as_gone(old, new, lost):
    assert API["gone"]({"k": old}, {"k": new}) == lost


def test_a_name_is_not_dropped_by_writing_the_list_again(tmp_path, monkeypatch):
    file = tmp_path / "api.json"
    file.write_text(json.dumps(STORED | {"methods": [*STORED["methods"], "a_method_of_old"]}))
    main = API["main"]
    monkeypatch.setitem(main.__globals__, "FILE", file)
    with pytest.raises(SystemExit, match="methods: a_method_of_old"):
        main()
    main("--breaking")
    assert json.loads(file.read_text()) == STORED


def test_the_version_is_the_same_everywhere():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="read once is enough")
def test_the_package_says_that_it_is_typed():
    assert (ROOT / "src/offdrift/py.typed").is_file()
