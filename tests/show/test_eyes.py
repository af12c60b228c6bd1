"""Every page of ours at two widths and in both themes: nothing sticks out, is cut or pale, and all of it is reached by key."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from offdrift.audit.compare import write_comparison
from offdrift.audit.page import write_audit_page
from offdrift.audit.result import ArmsAudit, Audit
from offdrift.audit.watch_page import WatchPage
from offdrift.check.page import write_check_page
from offdrift_lab.plan.page import write_plan_page
from offdrift_lab.train.report.page import write_report
from tests.alarms.receivers import FINDING
from tests.show.browser import Browser, browser, chromium
from tests.show.eyes import faults, walk
from tests.show.hostile import swept
from tests.show.synthetic import write_run
from tests.show.synthetic_audit import audit, check, planned


def watched(folder: Path) -> Path:
    """The page of a watch with a finding."""
    page = WatchPage(folder.with_suffix(".html"), "runs/a", "offdrift")
    for step in range(1, 13):
        row = {"step": step, "mismatch/k3": 0.001 * step, "mismatch/chi2_token": 0.02, "reward/mean": 0.5}
        page.show("log", row, [FINDING] if step == 9 else [])
    page.close()
    return page.file


PAGES = {
    "report": lambda folder: write_report(write_run(folder, updates=6)),
    "audit": lambda folder: write_audit_page(audit(steps=8), folder),
    "arms": lambda folder: ArmsAudit({"a": Audit(audit(steps=8)), "b": Audit(audit(seed=1))}).write_page(folder),
    "check": lambda folder: write_check_page(check(), folder),
    "compare": lambda folder: write_comparison(
        audit(steps=4), audit(steps=4, seed=1), ("a", "b"), folder / "compare.html"
    ),
    "sweep": swept,
    "watch": watched,
    "plan": lambda folder: write_plan_page(planned("plain"), folder / "plan.html"),
}


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium()  # skips before any work is done
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_ours_is_whole_readable_and_reached_by_key(chrome: Browser, tmp_path: Path, name: str) -> None:
    chrome.open(PAGES[name](tmp_path / name))
    chrome.press("Tab")
    assert chrome.run("document.activeElement.className") == "skip"
    chrome.press("Enter")
    assert chrome.run("location.hash.length > 1 && document.querySelector(location.hash) !== null")
    missed, off_screen, reached = walk(chrome)
    assert (missed, off_screen) == ([], [])
    assert reached > 8
    summary = "document.querySelector('details:not([open]) > summary')"
    if chrome.run(f"{summary} !== null"):
        chrome.run(f"window.folded = {summary}; folded.focus()")
        chrome.press("Enter")
        assert chrome.run("folded.parentElement.open")
    assert faults(chrome) == []


PLANTED = """<!doctype html><html data-drawn><meta charset="utf-8"><title>planted</title>
<style>body {{ margin: 0; font: 16px sans-serif; color: #111; background: #fff }} :focus-visible {{ outline: 2px solid #00f }}
@media (prefers-color-scheme: dark) {{ body {{ color: #eee; background: #111 }} a {{ color: #9cf }} }}</style>
<body><p>Plain words.</p><a href="#x">link</a>{}</body></html>"""


@pytest.mark.parametrize(
    ("markup", "fault"),
    [
        ("", ""),
        ('<div style="width: 1100px">wide</div>', "390 pixels, light: the page is 1100 wide"),
        ('<p style="width: 60px; overflow: hidden; white-space: nowrap">much longer than it is wide</p>', "cut at the side"),
        ('<p style="height: 10px; overflow: hidden">one<br>two</p>', "cut below"),
        ('<div style="position: relative; overflow-x: clip; width: 99%"><p style="position: absolute; left: 97%; white-space: nowrap">beyond the edge</p></div>', "sticks out of the window"),
        ('<p style="color: #999; background: #fff">pale</p>', "1280 pixels, light: contrast 2.85"),
        ('<div style="background: #fff"><p>light on light in the dark</p></div>', "1280 pixels, dark: contrast 1.16"),
        ('<p><b style="opacity: .5">half</b></p>', "contrast"),
        ('<button style="outline: none">no ring</button>', "focus cannot be seen: button"),
        ('<button tabindex="-1" role="button" class="a">never</button>', ""),
        ('<a href="#y" tabindex="-2">never</a>', "not reached by Tab: a"),
        ('<pre style="overflow-x: auto; width: 200px">' + "x" * 200 + "</pre>", "scrolls, and not by key: pre"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_seen(chrome: Browser, tmp_path: Path, markup: str, fault: str) -> None:
    page = tmp_path / "planted.html"
    page.write_text(PLANTED.format(markup), "utf-8")
    chrome.open(page)
    seen = faults(chrome)
    assert any(fault in words for words in seen) if fault else seen == [], seen


def test_a_control_that_tab_never_comes_to_is_named(chrome: Browser, tmp_path: Path) -> None:
    page = tmp_path / "trap.html"
    trap = (
        '<button onkeydown="if (event.key === \'Tab\') event.preventDefault()">trap</button><a href="#z">behind it</a>'
    )
    page.write_text(PLANTED.format(trap), "utf-8")
    chrome.open(page)
    missed, _, _ = walk(chrome, most=20)
    assert [words.split()[0] for words in missed] == ["a"]
    page.write_text(PLANTED.format('<a href="#z" style="position: absolute; left: -999px">gone</a>'), "utf-8")
    chrome.open(page)
    assert walk(chrome, most=20)[1] == ["a “gone”"]
