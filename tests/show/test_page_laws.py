"""What holds of every page: it trusts no text, loads nothing, its parts refer to each other, and it is written whole."""

import base64
import hashlib
import itertools
import json
import random
import re
import zlib
from pathlib import Path

import pytest

from offdrift.audit.compare import write_comparison
from offdrift.audit.page import render_audit, write_audit_page
from offdrift.audit.result import ArmsAudit, Audit
from offdrift.check.page import write_check_page
from offdrift.show.anchors import on_page
from offdrift.show.charts import Chart, Series
from offdrift.show.figures import figure_page
from offdrift.show.findings import finding_view
from offdrift.show.html import _ASSETS as ASSETS
from offdrift.show.html import PAGE_BYTES, write_document
from offdrift.show.json_access import read_lines, visible, visible_token
from offdrift.show.packed import unpack
from offdrift_lab.plan.page import write_plan_page
from offdrift_lab.train.report.page import QUANTITIES, write_report
from tests.show.hostile import PAYLOADS, SHOWN, hostile, swept, write_hostile_run
from tests.show.parsed import Parsed, parse
from tests.show.screens import flat, printed
from tests.show.synthetic import overlap, write_lines, write_run
from tests.show.synthetic_audit import audit, check, finding, little, planned

ALL = "".join(PAYLOADS)
NAMES = ("report", "audit", "arms", "check", "compare", "figure", "plan", "sweep")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Parsed, Parsed]]:
    """Every kind of page, once of plain and once of hostile texts."""

    def figure(text: str, stem: Path) -> Path:
        chart = Chart(text, text, [Series(text, [1, 2], [3.0, 4.0])], meaning=text, lines=[(1, text)])
        return write_document(figure_page([chart], title=text, caption=text), stem)

    folder = tmp_path_factory.mktemp("pages")
    plain, bad = audit(steps=3), hostile(audit(steps=3), ALL)
    run = overlap(write_run(folder / "run"))
    write_lines(run / "arms/none/findings.jsonl", [finding(rule="a"), finding(rule="b"), finding(rule="a")])
    both = {
        "report": (write_report(run), write_report(write_hostile_run(folder / "hostile"))),
        "audit": (write_audit_page(plain, folder / "a"), write_audit_page(bad, folder / "b")),
        "check": (write_check_page(check(), folder / "a"), write_check_page(hostile(check(), ALL), folder / "b")),
        "arms": (
            ArmsAudit({"a": Audit(plain), "b": Audit(plain)}).write_page(folder / "a"),
            ArmsAudit({f"a{ALL}": Audit(bad), f"b{ALL}": Audit(bad)}).write_page(folder / "b"),
        ),
        "compare": (
            write_comparison(plain, plain, ("a", "b"), folder / "a.html"),
            write_comparison(bad, bad, (f"a{ALL}", f"b{ALL}"), folder / "b.html"),
        ),
        "plan": (
            write_plan_page(planned("plain"), folder / "p.html"),
            write_plan_page(planned(ALL), folder / "q.html"),
        ),
        "sweep": tuple(swept(folder / name, text) for name, text in (("plain", ""), ("bad", ALL))),
        "figure": (figure("plain", folder / "plain.html"), figure(ALL, folder / "bad.html")),
    }
    return {name: (parse(good), parse(other)) for name, (good, other) in both.items()}


@pytest.mark.parametrize("name", NAMES)
def test_hostile_texts_add_no_element_and_no_attribute(pages: dict, name: str) -> None:
    good, bad = pages[name]
    assert {tag for tag, _ in bad.tags} <= {tag for tag, _ in good.tags}
    names = {attribute for _, attributes in bad.tags for attribute in attributes}
    assert names <= {attribute for _, attributes in good.tags for attribute in attributes}
    assert not any(attribute.startswith("on") for attribute in names)
    assert [[tag for tag, _ in bad.tags].count(tag) for tag in ("script", "style", "img")] == [3, 1, 0]
    block = bad.raw["script"][0]
    assert not re.search("[<>&\u2028\u2029]", block)
    data = json.loads(block)
    texts = [s["name"] for c in data["charts"] for s in c["series"]]
    assert texts
    texts += [x for column in data["columns"] for x in column if isinstance(x, str)]
    assert not any(re.search("<[a-z/]", text) for text in texts), "plotly reads markup"


EVERYTHING = "".join(SHOWN)
PLACES = {
    "report": [place + shown for place in ("prompt ", "ended by finish ", "note ", "description ", "key ", "package ") for shown in SHOWN],
    "audit": [place + EVERYTHING for place in (
        "mask tokens outside [0.5, 5].", "at the same weights.", "with the learning rate.", "truncated at 2.", "0.001 nat.",
        "arXiv:2510.26788", "snippet ", "column ", "/data/", "inside a string", "112.jsonl", "Think step by step.",
        "no routing was logged", "in both engines", "no length is favored", "so the answer is", "decoupled_geo_rs",
        "the log lacks", "the gain 0.004", "every token are there", "(0.1 to 0.5)",
    )],
    "check": [place + EVERYTHING for place in (
        "SmolLM2-135M", "vllm", "0.11.0", "nat a token.", "instead of bfloat16", "dtype alone changes.", "no experts",
        "section 4.3", "trm_max", "clean sequences", "weights.", "routing replay",
    )],
    "arms": [place + EVERYTHING for place in ("a", "b", "at the same weights.")],
    "compare": [place + EVERYTHING for place in ("a", "b", "outside [0.5, 5].", "same weights.", "snippet ", "/data/")],
}  # fmt: skip
"""What stands before a payload in each page, and what a reader sees of the payload."""


@pytest.mark.parametrize("name", PLACES)
def test_hostile_texts_are_shown_as_text(pages: dict, name: str) -> None:
    _, bad = pages[name]
    text = "".join(bad.text)
    assert [words for words in PLACES[name] if words not in text] == []
    for shown in SHOWN if name == "report" else [EVERYTHING]:  # tokens, metrics, options, tabs
        assert bad.text.count(shown) >= {"report": len(PAYLOADS), "arms": 0}.get(name, 1)


WRITERS = {
    "report.html": lambda folder: write_report(write_run(folder, updates=2)),
    "audit/report.html": lambda folder: write_audit_page(little(), folder / "audit"),
    "arms/arms.html": lambda folder: ArmsAudit({"a": Audit(little()), "b": Audit({})}).write_page(folder / "arms"),
    "check/check.html": lambda folder: write_check_page({}, folder / "check"),
    "p.html": lambda folder: write_plan_page(planned("plain"), folder / "p.html"),
    "c.html": lambda folder: write_comparison(little(), {}, ("a", "b"), folder / "c.html"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_page_is_written_alone_and_the_same_each_time(tmp_path: Path, name: str) -> None:
    page = WRITERS[name](tmp_path)
    assert page == tmp_path / name
    first = page.read_bytes()
    assert WRITERS[name](tmp_path).read_bytes() == first
    assert {p.name for p in page.parent.iterdir()} <= {page.name, "run.json", "arms"}


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_lets_the_scripts_and_the_style_sheet_apply_and_nothing_else(pages: dict, name: str) -> None:
    policies = [
        a["content"] for p in pages[name] for _, a in p.tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 2
    assert policies[0] == policies[1], "the policy depends on no text that was stored"
    directives = dict(part.strip().split(" ", 1) for part in policies[0].split(";"))
    good, _ = pages[name]
    plotly, script = zlib.decompress(base64.b64decode(good.raw["script"][1])).decode(), good.raw["script"][2]
    assert plotly.startswith("/**\n* plotly.js (basic"), (
        "the page's script runs it only where its hash is that of the policy"
    )
    assert directives["script-src"].split() == [digest(plotly), digest(script)]
    assert directives["style-src-elem"].split() == [digest(good.raw["style"][0]), digest("")]
    assert {directives[k] for k in ("default-src", "base-uri", "form-action")} == {"'none'"}
    assert "unsafe" not in directives["script-src"] + directives["style-src-elem"]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_refers_to_nothing_outside_itself_and_its_references_resolve(pages: dict, name: str) -> None:
    for page in pages[name]:
        links = [a[k] for _, a in page.tags for k in ("src", "href", "action", "srcset") if k in a]
        beside = [link for link in links if re.fullmatch(r"[\w%.~-]+/report\.html(#[a-z0-9_-]+)?", link)]
        assert bool(beside) == (name == "arms")  # the pages of the arms, which stand in folders beside it
        assert all(link == "data:," or link.startswith("#") for link in links if link not in beside)
        assert not re.search(r"url\(|@import", page.raw["style"][0])
        ids = [a["id"] for _, a in page.tags if "id" in a]
        keys = ("aria-labelledby", "aria-describedby", "aria-controls", "for")
        references = [a[k] for _, a in page.tags for k in keys if k in a]
        references += [link[1:] for link in links if link.startswith("#")]
        assert len(ids) == len(set(ids))
        assert references
        assert set(references) <= set(ids)


@pytest.mark.parametrize("text", ["a\tb\nc é 漢 ½ ∅", "👩\u200d🚀", "می\u200cخواهم", "\ufffd", ""])
def test_what_can_be_seen_is_left_alone(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize("code", [0x00, 0x1B, 0x7F, 0x200B, 0x2028, 0x2029, 0x202E, 0x2066, 0xD800, 0xFEFF])
def test_what_cannot_be_seen_is_shown_as_its_code(code: int) -> None:
    assert visible(f"a{chr(code)}b") == f"a\\u{code:04x}b"


def test_newlines_and_empty_tokens_have_a_sign() -> None:
    assert [visible_token(t) for t in ("", "\n", "\n\nx", " y")] == ["∅", "↵\n", "↵\n↵\nx", " y"]


PAGES = pytest.mark.parametrize("name", NAMES)


@PAGES
def test_a_page_is_small(pages: dict, name: str) -> None:
    for page in pages[name]:
        assert sum(map(len, page.text)) + sum(len(x) for raw in page.raw.values() for x in raw) < PAGE_BYTES


@PAGES
def test_headings_are_in_order_and_every_section_has_one_and_a_link_to_itself(pages: dict, name: str) -> None:
    for page in pages[name]:
        levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), levels
        links = {a["href"][1:] for tag, a in page.tags if tag == "a"}
        sections = [a for tag, a in page.tags if tag == "section"]
        assert all("aria-labelledby" in a for a in sections)
        assert {a["id"] for a in sections} <= links
        assert len(sections) >= 4 or name == "figure"


@PAGES
def test_every_finding_chart_and_row_has_a_name_and_a_link_that_says_what_it_is(pages: dict, name: str) -> None:
    """A row of a table that a reader sorts, a finding, a figure: each has an id and one link to it."""
    for page in pages[name]:
        links = [a for tag, a in page.tags if tag == "a" and a.get("class") == "anchor"]
        targets = [a["href"][1:] for a in links]
        assert len(targets) == len(set(targets))
        assert all(
            a["aria-label"].startswith("Link to this ") or a["aria-label"].startswith("Link to these ") for a in links
        )
        places = [
            a.get("id") for tag, a in page.tags if tag == "figure" or (a.get("class") or "").startswith("finding ")
        ]
        rows = [a["id"] for tag, a in page.tags if tag == "tr" and "id" in a]
        kept = [p for p in places if p not in (None, "figure-explore")]
        assert set(kept) | set(rows) <= set(targets)
        assert all(re.fullmatch(r"[a-z0-9_-]+", place) for place in [*kept, *rows]), "safe whatever the text was"


def test_a_finding_has_the_same_name_on_the_page_and_in_the_json() -> None:
    stored = on_page([finding(rule="a"), finding(rule="B c"), finding(rule="a"), {}], "report.html")
    names = [f["page"].removeprefix("report.html#") for f in stored]
    assert names == ["finding-a", "finding-b-c", "finding-a-2", "finding"]
    page = render_audit(audit(steps=2) | {"findings": stored})
    assert [page.count(f'id="{name}"') for name in names] == [1, 1, 1, 1]
    assert "Details: report.html#finding-b-c" in flat(printed(finding_view(stored[1])))
    assert "On the page" not in printed(finding_view(finding()))


@PAGES
def test_a_page_prints_and_knows_both_themes(pages: dict, name: str) -> None:
    style = pages[name][0].raw["style"][0]
    assert "@page { size: A4" in style
    assert ".scroll { overflow: visible }" in style
    assert "@media print" in style
    assert style.count("prefers-color-scheme") == 2
    assert style.count("@media screen and (prefers-color-scheme: dark)") == 2, "paper is never dark"


@PAGES
def test_what_can_be_operated_is_a_control_and_what_scrolls_can_be_reached(pages: dict, name: str) -> None:
    for page in pages[name]:
        for tag, a in page.tags:
            if {"data-group", "data-filter"} & set(a) or a.get("role") == "tab" or a.get("class") in ("sort", "copy"):
                assert tag in ("button", "input"), (tag, a)
            if tag == "th" and "aria-sort" in a:
                assert a["scope"] == "col"
            if a.get("class") == "plot":
                assert (a["tabindex"], a["role"], a["aria-roledescription"]) == ("0", "group", "chart")
                assert "aria-describedby" in a or a["id"] == "chart-explore", "a chart says in words what it shows"
            if a.get("class") in ("scroll", "scroll tall", "tokens", "tokens ids") or (
                tag == "pre" and "hidden" not in a
            ):
                assert a.get("tabindex") == "0", (tag, a)
        skip = next(a for tag, a in page.tags if tag == "a") if name != "figure" else {"class": "skip"}
        assert skip["class"] == "skip"


def test_the_same_parts_make_all_five_pages(pages: dict) -> None:
    """One style sheet below what a page adds, one script, one frame: what looks alike is alike."""
    five = [pages[name][0] for name in ("report", "audit", "check", "plan", "sweep")]
    common = "".join((ASSETS / file).read_text("utf-8") for file in ("page.css", "views.css"))
    assert all(page.raw["style"][0].startswith(common) for page in five)
    assert len({page.raw["script"][2] for page in five}) == 1
    for page in five:
        classes = [a.get("class") for _, a in page.tags]
        assert [c for c in classes if c in ("skip", "brand", "facts")][:3] == ["skip", "brand", "facts"]
        assert any((c or "").startswith("verdict") for c in classes)
        assert "charts" in {(c or "").split(" ")[0] for c in classes}


def test_a_long_run_is_on_its_page_whole_and_the_page_stays_small(tmp_path: Path) -> None:
    steps = 10_000
    head = {"format": 1, "name": "long", "recipe": {}}
    (tmp_path / "run.json").write_text(json.dumps(head))
    for arm in range(4):
        draw = random.Random(arm)
        rows = [
            {"update": u, "reward/mean": draw.random()} | {q.key: draw.lognormvariate(-5, 0.5) for q in QUANTITIES}
            for u in range(steps)
        ]
        rows[7_777]["divergence/kl_rollout_current_max"] = 5.0
        write_lines(tmp_path / f"arms/{arm}/metrics.jsonl", rows)
    text = write_report(tmp_path).read_text("utf-8")
    assert len(text.encode()) < PAGE_BYTES
    series, columns = data_of(text)
    assert {s.get("of") for s in series.values()} == {None}, "no step is left out"
    x, y = (unpack(columns[series["kl_max", "0"][k]]) for k in "xy")
    assert x == list(range(steps))
    assert y[7_777] == 5.0
    assert y == pytest.approx(
        [r["divergence/kl_rollout_current_max"] for r in read_lines(tmp_path / "arms/0/metrics.jsonl")[0]], rel=2**-15
    )


def data_of(text: str) -> tuple[dict, list]:
    """The series of a page by chart and name, and its columns."""
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    return {(c["id"], s["name"]): s for c in data["charts"] for s in c["series"]}, data["columns"]


def test_where_not_all_fits_the_extremes_stay_and_the_page_says_so(tmp_path: Path) -> None:
    steps = 10_000
    draw = random.Random(0)
    charts = []
    for i in range(90):
        noise = [draw.lognormvariate(-5, 0.5) for _ in range(steps)]
        noise[7_777] = 5.0
        charts.append(Chart(f"chart {i}", "nat", [Series("a", list(range(steps)), noise)], log=True))
    text = figure_page(charts, title="long", caption="")
    assert 0.85 * PAGE_BYTES < len(text) < PAGE_BYTES
    series, columns = data_of(text)
    s = series["0", "a"]
    x, y = (unpack(columns[s[k]]) for k in "xy")
    assert s["of"] == steps > len(x) == len(y) > 1200
    assert y[x.index(7_777)] == 5.0
    assert (x[0], x[-1]) == (0, steps - 1)
    assert x == sorted(x)  # type: ignore[type-var]


def test_many_charts_of_one_column_are_small(tmp_path: Path) -> None:
    steps = 10_000
    flat = [1e-3 + 1e-4 * (i % 7) for i in range(steps)]
    flat[7_777] = 5.0
    charts = [Chart(f"chart {i}", "nat", [Series("a", list(range(steps)), flat)], log=True) for i in range(40)]
    text = figure_page(charts, title="long", caption="")
    assert len(text) < 0.8e6
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert len(data["columns"]) == 2, "what is drawn twice is stored once"
    assert unpack(data["columns"][1])[7_777] == 5.0
