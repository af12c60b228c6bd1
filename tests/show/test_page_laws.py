"""What holds of every page: it trusts no text, loads nothing, its parts refer to each other, and it is written whole."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from offdrift.audit.compare import write_comparison
from offdrift.audit.page import write_audit_page
from offdrift.check.page import write_check_page
from offdrift.plan.page import write_plan_page
from offdrift.show.charts import Chart, Series, figure_page
from offdrift.show.html import write_document
from offdrift.show.json_access import visible, visible_token
from offdrift.train.page import write_report
from tests.show.hostile import PAYLOADS, SHOWN, hostile, swept, write_hostile_run
from tests.show.parsed import Parsed, parse
from tests.show.synthetic import write_run
from tests.show.synthetic_audit import audit, check, little, planned

ALL = "".join(PAYLOADS)
NAMES = ("report", "audit", "check", "compare", "figure", "plan", "sweep")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Parsed, Parsed]]:
    """Every kind of page, once of plain and once of hostile texts."""

    def figure(text: str, stem: Path) -> Path:
        chart = Chart(text, text, [Series(text, [1, 2], [3.0, 4.0])], meaning=text, lines=[(1, text)])
        return write_document(figure_page([chart], title=text, caption=text), stem)

    folder = tmp_path_factory.mktemp("pages")
    plain, bad = audit(steps=3), hostile(audit(steps=3), ALL)
    both = {
        "report": (write_report(write_run(folder / "run")), write_report(write_hostile_run(folder / "hostile"))),
        "audit": (write_audit_page(plain, folder / "a"), write_audit_page(bad, folder / "b")),
        "check": (write_check_page(check(), folder / "a"), write_check_page(hostile(check(), ALL), folder / "b")),
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
    "compare": [place + EVERYTHING for place in ("a", "b", "outside [0.5, 5].", "same weights.", "snippet ", "/data/")],
}  # fmt: skip
"""What stands before a payload in each page, and what a reader sees of the payload."""


@pytest.mark.parametrize("name", PLACES)
def test_hostile_texts_are_shown_as_text(pages: dict, name: str) -> None:
    _, bad = pages[name]
    text = "".join(bad.text)
    assert [words for words in PLACES[name] if words not in text] == []
    for shown in SHOWN if name == "report" else [EVERYTHING]:  # tokens, metrics, options, tabs
        assert bad.text.count(shown) >= (len(PAYLOADS) if name == "report" else 1)


WRITERS = {
    "report.html": lambda folder: write_report(write_run(folder, updates=2)),
    "audit/report.html": lambda folder: write_audit_page(little(), folder / "audit"),
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
    assert directives["script-src"].split() == [digest(s) for s in good.raw["script"][1:]]
    assert directives["style-src-elem"].split() == [digest(good.raw["style"][0]), digest("")]
    assert {directives[k] for k in ("default-src", "base-uri", "form-action")} == {"'none'"}
    assert "unsafe" not in directives["script-src"] + directives["style-src-elem"]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_refers_to_nothing_outside_itself_and_its_references_resolve(pages: dict, name: str) -> None:
    for page in pages[name]:
        links = [a[k] for _, a in page.tags for k in ("src", "href", "action", "srcset") if k in a]
        assert all(link == "data:," or link.startswith("#") for link in links)
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


def test_a_long_run_keeps_its_spikes_and_its_page_stays_small(tmp_path: Path) -> None:
    steps = 10_000
    flat = [1e-3 + 1e-4 * (i % 7) for i in range(steps)]
    flat[7_777] = 5.0
    charts = [Chart(f"chart {i}", "nat", [Series("a", list(range(steps)), flat)], log=True) for i in range(40)]
    text = figure_page(charts, title="long", caption="")
    assert len(text) < 2_000_000
    data = json.loads(re.search(r'id="report-data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    series = data["charts"][0]["series"][0]
    x, y = data["columns"][series["x"]], data["columns"][series["y"]]
    assert len(x) == len(y) <= 1200
    assert y[x.index(7_777)] == 5.0
    assert (x[0], x[-1]) == (0, steps - 1)
    assert x == sorted(x)
