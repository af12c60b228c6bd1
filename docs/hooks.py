"""What mkdocs does beyond its themes, for the site that `make docs` builds.

* A page that the navigation forgets stands under "How to / More", so that a new one is never lost.
* Pages of the Python reference are made from `docs/api.json`, the list of public names.
* A link to a file of the repository leads to a page with its text: the site needs no server and no GitHub.
* The notebook becomes a page; the method table becomes a script that its page filters.
* Figures of ours stand inside the page, where they follow its light or dark mode.
* Formulas are drawn by KaTeX, which is beside the pages, on those that have any.
"""

from __future__ import annotations

import importlib
import inspect
import json
import posixpath
import re
import runpy
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from offdrift import _HOME as HOME

DOCS = Path(__file__).parent
ROOT = DOCS.parent
ANCHOR = runpy.run_path(str(DOCS / "anchors.py"))["anchor"]
NOTEBOOK = runpy.run_path(str(DOCS / "notebook.py"))
METHODS = ROOT / "src" / "offdrift" / "show" / "methods.json"
"""What `docs/generate.py` writes of every method and system."""
OUTSIDE = "repository"
"""Folder of the site for files of the repository that pages link to."""
WIDE = {"find-a-method.md", "methods.md", "evidence.md", "metrics.md", "settings.md"}
"""Pages whose tables need the room that the list of their headings would take."""
CLAIMS = "evidence.md"
"""Page whose tables are shown as cards with a search."""
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
WORKER = re.compile(r"https://unpkg\.com/iframe-worker/shim")
FORMULA = 'class="formula"'
"""What a formula has on a page."""
INLINE = re.compile(r"\$<code>(.*?)</code>\$", re.DOTALL)
"""A formula within a line, in GitHub's marks: code between dollars."""
KINDS = {".py": "python", ".toml": "toml", ".json": "json", ".jsonl": "json", ".yaml": "yaml", ".yml": "yaml"}

API_PAGES = {
    "offdrift": "The package itself: what `import offdrift as od` gives. It needs torch, numpy and jaxtyping.",
    "offdrift.methods": "The table of methods, and how a row is made.",
    "offdrift.objectives": "Losses of a token, with their trust regions.",
    "offdrift.correction": "Gates, which keep or reject, and weights, which carry no gradient.",
    "offdrift.advantages": "Rewards to advantages.",
    "offdrift.stats": "Metrics, comparisons over seeds.",
    "offdrift.certificate": "Bounds, what a batch can prove, looks at the same data.",
    "offdrift.judge": "The diagnosis: readings, rules, findings.",
    "offdrift.records": "What a log says about where its tokens are from.",
    "offdrift.engines": "Rollout engines behind one interface.",
    "offdrift_lab.schedules": "Schedules of asynchronous training as compositions of rules.",
    "offdrift_lab.exact": "Policies small enough to know everything about them.",
    "imported by path in the docs": "Names that examples of this documentation import by their full path.",
}
"""Packages of the list of public names, in the order of the navigation, and what each is for."""


def on_config(config: Any) -> Any:
    """One rule for the anchors of headings, and a navigation that no page is missing from."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda text, _: ANCHOR(text)
    _at(config.nav, "Reference", "Python").extend({_title(name): _page(name)} for name in API_PAGES)
    listed = {*_leaves(config.nav)}
    there = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))
    more = _at(config.nav, "How to", "More")
    more.extend(page for page in there if page not in listed)
    if not more:
        how_to = _at(config.nav, "How to")
        how_to[:] = [entry for entry in how_to if entry != {"More": []}]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Pages and scripts that are made and not written."""

    def add(path: str, text: str) -> None:
        files.append(File.generated(config, path, content=text))

    listed = json.loads((DOCS / "api.json").read_text("utf-8"))
    homes: dict[str, str] = {}
    for name, about in API_PAGES.items():
        add(_page(name), _api_page(name, about, listed[name], homes))
    for notebook in sorted(DOCS.glob("*.ipynb")):
        add(f"{notebook.stem}.md", NOTEBOOK["page"](notebook))
    add("assets/methods.js", f"window.OFFDRIFT_METHODS = {METHODS.read_text('utf-8')};\n")
    wanted, done = {"CHANGELOG.md", "CONTRIBUTING.md"}, set()
    for page in DOCS.rglob("*.md"):
        wanted |= {*outside(page.read_text("utf-8"), page.relative_to(ROOT).as_posix())}
    while wanted - done:
        path = min(wanted - done)
        done.add(path)
        text = (ROOT / path).read_text("utf-8")
        if path.endswith(".md"):
            wanted |= {*outside(text, path)}
        add(_copy(path), text if path.endswith(".md") else _source_page(path, text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files of the repository, and figures of ours."""
    place = page.file.src_uri
    if place in WIDE:
        page.meta["hide"] = ["toc"]
    origin = place.removeprefix(f"{OUTSIDE}/") if place.startswith(f"{OUTSIDE}/") else f"docs/{place}"

    def moved(match: re.Match[str]) -> str:
        path, _, anchor = match[0].partition("#")
        if not path or _is_remote(path):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        site = target.removeprefix("docs/") if target.startswith("docs/") else _copy(target)
        made = site.removesuffix(".ipynb") + ".md"
        if site.endswith(".ipynb") and made != place:
            site = made
        relative = posixpath.relpath(site, posixpath.dirname(place) or ".")
        return f"{relative}#{anchor}" if anchor else relative

    return _figures(_outside_code(markdown, lambda text: _bars(LINK.sub(moved, text))), place)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Claims become cards; columns of long text are given room, so that a table scrolls instead of standing a word a line."""
    if page.file.src_uri == CLAIMS:
        return _claims(html)
    html = INLINE.sub(r'<span class="formula">\1</span>', html)
    return re.sub(r"<table>.*?</table>", lambda table: _with_room(table[0]), html, flags=re.DOTALL)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Nothing is loaded from another machine; what draws formulas, where there are some."""
    assets = posixpath.relpath("assets", posixpath.dirname(page.file.dest_uri) or ".")
    if FORMULA in output:
        output = output.replace("</head>", f'<link rel="stylesheet" href="{assets}/katex/katex.min.css"></head>')
        scripts = "".join(f'<script src="{assets}/{name}"></script>' for name in ("katex/katex.min.js", "formulas.js"))
        output = output.replace("</body>", f"{scripts}</body>")
    return WORKER.sub(f"{assets}/iframe-worker.js", output)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for the page of a missing address."""
    return WORKER.sub("assets/iframe-worker.js", output_content)


# -- pages that are made --------------------------------------------------------------------------------


def _title(name: str) -> str:
    return "Imported by path" if " " in name else name


def _page(name: str) -> str:
    return f"api/{_title(name).lower().replace(' ', '-')}.md"


def _api_page(name: str, about: str, members: list[str], homes: dict[str, str]) -> str:
    """A directive for each public name; one that an earlier page has is a link to it.

    A name of the package may be a module, too (`offdrift.aggregate`), so directives name what is meant by where it is
    defined; an anchor has the name that users write.

    Args:
        homes: address by place of definition; what this page documents is added.
    """
    links, parts = [], []
    for member in sorted({member.partition("(")[0] for member in members}, key=str.casefold):
        path = member if " " in name else f"{name}.{member}"
        defined = _defined(*path.rsplit(".", 1))
        if defined in homes:
            links.append(f"[`{path}`]({homes[defined]})")
        else:
            homes[defined] = f"{posixpath.basename(_page(name))}#{path}"
            parts += [f'<a id="{path}"></a>', "", f"::: {defined}", ""]
    also = [f"On other pages: {', '.join(links)}.", ""] if links else []
    return "\n".join([f"# {_title(name)}", "", about, "", *also, *parts])


def _defined(room: str, name: str) -> str:
    """Where a public name is defined, as a path."""
    room = HOME[name] if room == "offdrift" else room
    value = vars(importlib.import_module(room)).get(name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{room}.{name}"  # a module, or a table, which has no module written on it


def _source_page(path: str, text: str) -> str:
    kind = KINDS.get(Path(path).suffix, "text")
    return f"# {path}\n\n````{kind}\n{text.rstrip()}\n````\n"


def _copy(path: str) -> str:
    """Where the site has a file of the repository."""
    return f"{OUTSIDE}/{path}" if path.endswith(".md") else f"{OUTSIDE}/{path}.md"


def outside(text: str, origin: str) -> list[str]:
    """Files of the repository, outside docs/, that a page links to."""
    paths = []
    for target in LINK.findall(FENCE.sub("", text)):
        path = target.partition("#")[0]
        if not path or _is_remote(path):
            continue
        full = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if not full.startswith("docs/") and (ROOT / full).is_file():
            paths.append(full)
    return paths


def _is_remote(path: str) -> bool:
    return bool(re.match(r"[a-z]+:", path))


# -- text ---------------------------------------------------------------------------------------------


def _outside_code(markdown: str, change: Any) -> str:
    """The text with its fenced blocks left alone."""
    parts, at = [], 0
    for block in FENCE.finditer(markdown):
        parts += [change(markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, change(markdown[at:])])


def _bars(markdown: str) -> str:
    """Tables with plain bars in their code: GitHub needs them escaped, and Python-Markdown would show the escape."""
    row = re.compile(r"^\|.*$", re.MULTILINE)
    return row.sub(lambda line: re.sub(r"`[^`\n]*`", lambda code: code[0].replace("\\|", "|"), line[0]), markdown)


def _figures(markdown: str, place: str) -> str:
    """Pictures from figures/ as part of the page: colours then follow its mode."""

    def inline(match: re.Match[str]) -> str:
        source = (DOCS / posixpath.dirname(place) / match["path"]).read_text("utf-8").strip()
        return f'\n<figure class="drawn" role="img" aria-label="{match["alt"]}" markdown="0">\n{source}\n</figure>\n'

    return re.sub(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)]*figures/[^)]+\.svg)\)", inline, markdown)


def _with_room(table: str) -> str:
    """A table whose head says how narrow each column may become, by its longest cell."""
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table.split("</tr>")]
    longest = [
        max(map(len, (re.sub(r"<[^>]+>", "", cell) for cell in column))) for column in zip_longest(*rows, fillvalue="")
    ]
    widths = iter([next((em for n, em in ROOM if length > n), 0) for length in longest])

    def head(match: re.Match[str]) -> str:
        em = next(widths, 0)
        before = match["style"] or ""
        return f'<th style="{before} min-width: {em}em">' if em else match[0]

    return re.sub(r'<th(?: style="(?P<style>[^"]*)")?>', head, table)


def _claims(html: str) -> str:
    """The tables of claims as cards, below a field that searches them: verdict, claim, numbers and command are seen at once.

    Paragraphs on how to read them, all but the first, are folded, so that the first cards are on the first screen.
    """
    verdict = ""

    def change(match: re.Match[str]) -> str:
        nonlocal verdict
        if match["verdict"]:
            verdict = re.sub(r"<[^>]+>|¶|&para;", "", match["verdict"])
            return match[0]
        heads = re.findall(r"<th(?: [^>]*)?>(.*?)</th>", match[0], re.DOTALL)
        if "claim" not in heads:  # where regimes of sources were read
            return _with_room(match[0])
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in match[0].split("</tr>")]
        cards = [_claim(verdict, dict(zip(heads, row, strict=True))) for row in rows if row]
        return f'<div class="claims">{"".join(cards)}</div>'

    body = re.sub(r"<h2[^>]*>(?P<verdict>.*?)</h2>|<table>.*?</table>", change, html, flags=re.DOTALL)
    search = (
        '<p class="finder claim-search"><label>search the claims <input id="claim-search" type="search" '
        'autocomplete="off"></label> <span id="claim-count" aria-live="polite"></span></p>'
    )
    first, heading, rest = body.partition("<h2")
    counts, end, reading = first.partition("</p>")
    folded = f"<details><summary>How to read the verdicts</summary>{reading}</details>" if reading.strip() else ""
    return f'{counts}{end}{search}{folded}{heading}{rest}<script src="assets/claims.js" defer></script>'


def _claim(heading: str, row: dict[str, str]) -> str:
    """A card: verdict (the heading's, unless the row has its own), claim, numbers, command, and what was tested."""
    verdict = row.get("verdict", heading)
    kind = verdict.split()[0].lower()
    tested = " · ".join(filter(None, (row["source"], row["testbed"], row["regime"].replace("<br>", "; "))))
    return (
        f'<article class="claim"><p><span class="chip chip-{kind}">{verdict}</span> <b>{row["claim"]}</b></p>'
        f'<p>{row["numbers"]}</p><p class="claim-run">{row["command"]}</p><p class="claim-soft">{tested}</p></article>'
    )


ROOM = ((120, 19), (50, 13), (20, 8))
"""From how many characters of its longest cell a column is at least how wide, in letters."""

# -- navigation ---------------------------------------------------------------------------------------


def _at(nav: list[Any], *titles: str) -> list[Any]:
    """The list of a section of the navigation."""
    for title in titles:
        (nav,) = [entry[title] for entry in nav if isinstance(entry, dict) and title in entry]
    return nav


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [leaf for entry in entries for leaf in _leaves(entry)]
