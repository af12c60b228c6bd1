"""The documentation site: it builds without a warning, every link and anchor of it leads somewhere on this disk, nothing
is loaded from another machine, and every public name has its place."""

import doctest
import json
import os
import posixpath
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.show.browser import Browser, browser
from tests.show.eyes import STILL, faults, walk

ROOT = Path(__file__).parents[2]
API = json.loads((ROOT / "docs" / "api.json").read_text("utf-8"))
PLACES = {
    "exit statuses": "command-line.md",
    "methods": "methods.md",
    "schedules": "schedules.md",
    "metrics": "metrics.md",
    "rules": "rules.md",
    "log columns": "logs.md",
    "record arguments": "logs.md",
    "recipe settings": "settings.md",
    "sweep settings": "settings.md",
}
"""Where the names of a kind are documented that are not Python's."""
CLAIMS = (ROOT / "docs" / "evidence.toml").read_text("utf-8").count("[[claim]]")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Anchors of a page, where it leads, what it loads, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loads, self.words = {"", "__search"}, [], [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe", "source", "video") and "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and {*given.get("rel", "").split()} & {
            "stylesheet",
            "icon",
            "preload",
            "prefetch",
            "preconnect",
        }:
            self.loads.append(given["href"])

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def broken(pages: dict[str, Page], files: set[str]) -> list[str]:
    """Links and loads of pages that lead nowhere, as "page: address"."""
    wrong = []
    for place, page in pages.items():
        for address in [*page.links, *page.loads]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loads or parts.scheme not in ("https", "mailto"):
                    wrong.append(f"{place}: {address}")
                continue
            path = unquote(parts.path)
            target = posixpath.normpath(posixpath.join(posixpath.dirname(place), path)) if path else place
            if target not in files or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                wrong.append(f"{place}: {address}")
    return wrong


@pytest.mark.parametrize(
    ("html", "wrong"),
    [
        ('<a href="b.html#there">', 0),
        ('<a href="b.html#nowhere">', 1),
        ('<a href="c.html">', 1),
        ('<a href="#top"><p id="top">', 0),
        ('<img src="gone.png">', 1),
        ('<script src="https://unpkg.com/x">', 1),
        ('<a href="https://arxiv.org/abs/1">', 0),
        ('<link rel="stylesheet" href="https://fonts.example/a.css">', 1),
    ],
)
def test_a_link_that_leads_nowhere_is_noticed(html, wrong):
    pages = {"a.html": Page(html), "b.html": Page('<h2 id="there">')}
    assert len(broken(pages, {*pages})) == wrong


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="make install-test brings it")
    pytest.importorskip("mkdocstrings", reason="make install-test brings it")
    folder = tmp_path_factory.mktemp("site")
    # A proxy that refuses everything: the build needs no network.
    alone = {"NO_MKDOCS_2_WARNING": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **alone}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@cache
def pages_of(folder: Path) -> dict[str, Page]:
    return {p.relative_to(folder).as_posix(): Page(p.read_text("utf-8")) for p in folder.rglob("*.html")}


@pytest.mark.slow
def test_every_link_and_anchor_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    pages, files = pages_of(site), {p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()}
    assert len(pages) > 60
    assert sum(len(page.links) for page in pages.values()) > 5000
    # The page of a missing address may stand anywhere, so its addresses begin at the root of the site.
    assert broken({place: page for place, page in pages.items() if place != "404.html"}, files) == []


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site):
    index = pages_of(site)["index.html"]
    listed = {posixpath.normpath(link) for link in index.links}
    made = {p.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert {page.replace("README.html", "index.html") for page in made} - listed == set()


@pytest.mark.parametrize("kind", PLACES)
def test_every_public_name_is_on_its_page(kind):
    text = (ROOT / "docs" / PLACES[kind]).read_text("utf-8")
    forms = {
        "exit statuses": r"^\| {first} \|",
        "record arguments": r"`{name}=?`",
        "recipe settings": r"(`|^#+ ){name}(`|$)",
        "sweep settings": r"(`|^#+ ){name}(`|$)",
    }
    form = forms.get(kind, r"`{name}`")
    missing = []
    for name in API[kind]:
        pattern = form.format(name=re.escape(name), first=re.escape(name.split()[0]))
        if not re.search(pattern, text, re.MULTILINE):
            missing.append(name)
    assert missing == []


def test_every_option_of_every_command_is_in_the_table_of_its_command():
    text = (ROOT / "docs" / "commands.md").read_text("utf-8")
    tables = {part.partition("\n")[0]: part for part in re.split(r"^#+ ", text, flags=re.MULTILINE)}
    for name in API["commands"]:
        *command, option = name.split()
        head = rf"^\| `([^`]*[ /])?{re.escape(option)}[ `,]"
        assert re.search(head, tables[f"offdrift {' '.join(command)}"], re.MULTILINE), name


@pytest.mark.slow
def test_every_public_name_of_python_has_an_anchor_and_words(site):
    griffe = pytest.importorskip("griffe")
    packages = {
        n: griffe.load(n, search_paths=[ROOT / "src"], resolve_aliases=True) for n in ("offdrift", "offdrift_lab")
    }
    pages = pages_of(site)
    anchors = {anchor for place, page in pages.items() if place.startswith("api/") for anchor in page.anchors}
    links = {urlsplit(a).fragment for place, page in pages.items() if place.startswith("api/") for a in page.links}
    kinds = [kind for kind in API if kind.startswith(("offdrift", "imported"))]
    assert len(kinds) > 10
    for kind in kinds:
        for member in API[kind]:
            short = member.partition("(")[0]
            path = short if kind.startswith("imported") else f"{kind}.{short}"
            package, _, inside = path.partition(".")
            target = packages[package][inside]
            assert (target.final_target if target.is_alias else target).docstring, f"{path} has no docstring"
            elsewhere = [f"[`{path}`]" in text or f">{path}<" in text for text in _texts(site)]
            assert path in anchors or any(elsewhere), path
            assert path in anchors or links


@cache
def _texts(site: Path) -> list[str]:
    return [p.read_text("utf-8") for p in (site / "api").glob("*.html")]


@pytest.mark.slow
def test_the_finder_has_every_row_of_the_table(site):
    script = (site / "assets" / "methods.js").read_text("utf-8")
    rows = json.loads(script.removeprefix("window.OFFDRIFT_METHODS = ").rstrip().rstrip(";"))["rows"]
    assert {*API["methods"]} <= {*rows}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("", "138 of 138 methods"),
        ("audit=stale", "13 of 138 methods"),
        ("q=deepseek&reads=full", "deepseek_v32"),
        ("reads=mismatch&level=token&open=icepop", 'id="method-icepop" open=""'),
        ("q=nothing+is+called+this", "Nothing is left"),
    ],
)
def test_the_finder_filters_in_a_browser(site, choice, words, tmp_path):
    page = f"file://{site}/find-a-method.html#{choice}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000"]
    done = subprocess.run([str(CHROMIUM), *flags, "--dump-dom", page], capture_output=True, text=True, timeout=120)
    assert words in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize(("words", "found"), [("", CLAIMS), ("figure 3 loose", 2), ("nothing is called this", 0)])
def test_the_claims_are_searched_in_a_browser(site, words, found, tmp_path):
    page = f"file://{site}/evidence.html" + (f"#q={words.replace(' ', '%20')}" if words else "")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000"]
    done = subprocess.run([str(CHROMIUM), *flags, "--dump-dom", page], capture_output=True, text=True, timeout=120)
    assert f"{found} of {CLAIMS} claims" in done.stdout


def test_a_claim_is_a_card_with_its_verdict_numbers_and_command():
    cells = {"claim": "It holds.", "source": "a paper", "testbed": "a model", "regime": "8 seeds", "numbers": "KL 0.1", "command": "<code>run</code>"}  # fmt: skip
    head = f"<thead><tr>{''.join(f'<th>{name}</th>' for name in cells)}</tr></thead>"
    row = "".join(f"<td>{cell}</td>" for cell in cells.values())
    make = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["_claims"]
    page = make(f'<p>All</p><p>Read</p><h2 id="r">Falsified here</h2><table>{head}<tr>{row}</tr></table>')
    assert "<table" not in page
    assert page.count('<article class="claim">') == 1
    card = re.sub(r"<[^>]+>", "", page[page.index("<article") : page.index("</article")])
    assert card.split(" · ") == ["Falsified here It holds.KL 0.1runa paper", "a model", "8 seeds"]
    assert page.index("<p>All") < page.index("claim-search") < page.index("<details") < page.index("<p>Read")
    assert page.index("<p>Read") < page.index("</details>") < page.index("<h2")


def test_a_new_page_is_not_lost_and_a_file_of_the_repository_is_shown(tmp_path):
    pytest.importorskip("mkdocs", reason="make install-test brings it")
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    assert hooks["outside"]("[a](../examples/cluster.toml) [b](plan.md) [c](https://x.y) [d](#e)", "docs/plan.md") == [
        "examples/cluster.toml"
    ]
    text = "see [a](x.md)\n\n```\n[b](y.md)\n```\n"
    assert hooks["_outside_code"](text, str.upper) == "SEE [A](X.MD)\n\n```\n[b](y.md)\n```\n"
    assert re.search(
        "min-width: 13em", hooks["_with_room"](f"<table><tr><th>a</th></tr><tr><td>{'x ' * 30}</td></tr></table>")
    )


@pytest.mark.parametrize("module", ["anchors", "docstrings", "reference_pages"])
def test_what_makes_pages_does_what_its_examples_say(module):
    if module == "docstrings":
        pytest.importorskip("griffe", reason="make install-test brings it")
    names = runpy.run_path(str(ROOT / "docs" / f"{module}.py"))
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for name in {"anchor", "for_page", "prose"} & {*names}:
        for test in finder.find(names[name], name, module=False, globs=names):
            runner.run(test)
    assert runner.summarize() == (0, runner.tries)
    assert runner.tries >= 1


READ = [
    "index.html",
    "start.html",
    "three-policies.html",
    "certificates-in-short.html",
    "certificates.html",
    "metrics.html",
    "evidence.html",
    "find-a-method.html",
    "check.html",
    "integrations/trl.html",
    "api/offdrift.stats.html",
]
"""A page of each kind that the site has."""


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.send("Network.enable")
        opened.send("Network.setBlockedURLs", urls=["*search_index.js*"])  # megabytes that no page needs to be drawn
        yield opened


def visit(chrome: Browser, page: Path, width: int) -> None:
    chrome.resize(width, 844)
    chrome.media()
    chrome.send("Page.navigate", url=page.as_uri())
    chrome.wait("document.readyState === 'complete'")
    chrome.run(STILL)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("name", READ)
def test_a_page_of_the_site_is_whole_and_readable_and_its_formulas_are_drawn(site, chrome, name):
    visit(chrome, site / name, 1280)
    assert faults(chrome) == []
    drawn, wrong = chrome.run("['.formula .katex', '.katex-error'].map(s => document.querySelectorAll(s).length)")
    text = (ROOT / "docs" / name).with_suffix(".md")
    source = text.read_text("utf-8") if text.is_file() else ""
    assert (drawn, wrong) == (source.count("```math\n") + source.count("$`"), 0)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize(("name", "width"), [("certificates-in-short.html", 1280), ("evidence.html", 1280), ("three-policies.html", 390)])  # fmt: skip
def test_the_site_is_gone_through_by_key(site, chrome, name, width):
    visit(chrome, site / name, width)
    chrome.press("Tab")
    assert "md-skip" in chrome.run("document.activeElement.className")
    missed, off_screen, reached = walk(chrome)
    assert (missed, off_screen) == ([], [])
    assert reached > 15
    if width == 390:
        chrome.run("document.querySelector('label.md-header__button[for=__drawer]').focus()")
        chrome.press("Enter")
        assert chrome.run("document.getElementById('__drawer').checked")
        assert chrome.run(
            "document.querySelector('.md-sidebar--primary a').checkVisibility({visibilityProperty: true})"
        )
