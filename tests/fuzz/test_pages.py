"""No text of a log, a run, an audit, a check, a plan or a sweep becomes an element, a handler or an address of a page."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from offdrift.audit.compare import write_comparison
from offdrift.audit.page import write_audit_page
from offdrift.check.page import write_check_page
from offdrift.show.charts import Chart, Series
from offdrift.show.figures import figure_page
from offdrift.show.html import write_document
from offdrift_lab.plan.page import write_plan_page
from offdrift_lab.train.report.page import write_report
from tests.fuzz.test_readers import EXAMPLES
from tests.show.hostile import hostile, replaced, swept
from tests.show.parsed import Parsed, parse
from tests.show.synthetic import write_run
from tests.show.synthetic_audit import audit, check, planned

FRAGMENTS = (
    "<", ">", '"', "'", "`", "&", "=", "/", "\\", "{{", "}}", "{%", "%}", "{#", "</script>", "<script>", "</title>", "</style>",
    "</textarea>", "<!--", "-->", "<![CDATA[", "]]>", "&lt;", "&#60;", "&#x3c;script&#x3e;", "javascript:alert(1)",
    " onload=alert(1) ", " onerror=", "<svg/onload=alert(1)>", "<img src=x>", "<base href=//evil.example>",
    "<meta http-equiv=refresh content=0>", "<link rel=stylesheet href=http://evil.example/x.css>", "<iframe srcdoc=", " style=",
    "url(http://evil.example/x)", "@import", "//evil.example/x.js", "http://evil.example/", "data:text/html,<script>",
    "expression(alert(1))", "\u2028", "\u2029", "\u202e", "\x00", "\x1b[2J", "\r\n", "\t", "\ud800", "\udfff", "\ufeff",
    "\ufdd0", "__proto__", "constructor", "${alert(1)}", "<a href='javascript:x'>", "<b>", "<br>", "[bold]", "[/]",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), min_size=1, max_size=6).map("".join)
Writer = Callable[[str, Path], Path]


def run_page(text: str, folder: Path) -> Path:
    """A run whose every stored text, and the name of an arm and of a metric, end in this text."""
    run = write_run(folder / "run", updates=2)
    for file in (*run.rglob("*.json"), *run.rglob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        changed = [replaced(x, lambda words: words + text) for x in lines]
        for row in changed:
            row |= {f"metric{text}": 1.0, "format": 1} if file.name != "samples.jsonl" else {}
        file.write_text("".join(json.dumps(x) + "\n" for x in changed))
    return write_report(run)


def figure(text: str, folder: Path) -> Path:
    chart = Chart(text, text, [Series(text, [1, 2], [3.0, 4.0])], meaning=text, lines=[(1, text)])
    return write_document(figure_page([chart], title=text, caption=text), folder / "figure.html")


def compared(text: str, folder: Path) -> Path:
    one = spoiled_audit(text)
    return write_comparison(one, one, (f"a{text}", f"b{text}"), folder / "c.html")


def spoiled_audit(text: str) -> dict[str, Any]:
    return hostile(audit(steps=2), text)


PAGES: dict[str, Writer] = {
    "run": run_page,
    "audit": lambda text, folder: write_audit_page(spoiled_audit(text), folder / "a"),
    "check": lambda text, folder: write_check_page(hostile(check(), text), folder / "c"),
    "compare": compared,
    "plan": lambda text, folder: write_plan_page(planned(text), folder / "p.html"),
    "sweep": lambda text, folder: swept(folder / "s", text),
    "figure": figure,
}


def structure(page: Parsed) -> tuple[set[str], set[str]]:
    return {tag for tag, _ in page.tags}, {name for _, attributes in page.tags for name in attributes}


def check_page(page: Parsed, plain: Parsed) -> None:
    """Raise `AssertionError` if a page has what no text may add."""
    (tags, names), (allowed_tags, allowed_names) = structure(page), structure(plain)
    assert tags <= allowed_tags, tags - allowed_tags
    assert names <= allowed_names, names - allowed_names
    assert not [name for name in names if name.startswith("on")]
    assert [[tag for tag, _ in page.tags].count(tag) for tag in ("script", "style", "img")] == [3, 1, 0]
    for _, attributes in page.tags:
        for name in ("src", "href", "action", "formaction", "srcset", "poster", "data", "xlink:href"):
            if (link := attributes.get(name)) is not None:
                assert link == "data:," or link.startswith("#"), link
        if (style := attributes.get("style")) is not None:
            assert not re.search(r"url\(|expression|@import", style), style
    assert page.raw["script"][1:] == plain.raw["script"][1:], "a script is not the page's own"
    assert page.raw["style"] == plain.raw["style"]
    block = page.raw["script"][0]
    assert not re.search("[<>&\u2028\u2029]", block)
    json.loads(block)


@pytest.mark.parametrize("name", PAGES)
def test_no_text_becomes_an_element_a_handler_or_an_address(tmp_path: Path, name: str) -> None:
    plain = parse(PAGES[name]("plain", tmp_path))

    @settings(max_examples=max(3, EXAMPLES // 2), deadline=None, database=None, phases=(Phase.generate,),
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(text=TEXTS)
    def one(text: str) -> None:
        folder = tmp_path / "spoiled"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        check_page(parse(PAGES[name](text, folder)), plain)

    one()
    folder = tmp_path / "all"
    folder.mkdir()
    check_page(parse(PAGES[name]("".join(FRAGMENTS), folder)), plain)


@pytest.mark.parametrize(
    "planted",
    [
        "<script>x</script>",
        "<p onclick=x>",
        "<img src=http://evil.example>",
        "<a href='javascript:x'>",
        "<p style='x'>",
    ],
)
def test_a_text_that_got_through_would_be_noticed(tmp_path: Path, planted: str) -> None:
    page = figure("plain", tmp_path)
    plain = parse(page)
    page.write_text(page.read_text().replace("</main>", f"{planted}</main>", 1))
    with pytest.raises(AssertionError):
        check_page(parse(page), plain)
