"""Pages of this package: one HTML file each, that needs nothing but itself and trusts no text.

Every text goes through the template's autoescape, data reaches the scripts as escaped JSON, and the
Content-Security-Policy lets exactly the page's own scripts run (by their hash) and nothing be
loaded, so that markup which slipped through could still do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from offdrift.errors import RecordError
from offdrift.records.atomic import write_atomically
from offdrift.show.anchors import Anchors
from offdrift.show.charts import FEWEST_POINTS, PageColumns
from offdrift.show.json_access import visible, visible_token
from offdrift.show.numbers import duration, fixed, percent, short
from offdrift.show.packed import compressed

_ASSETS = Path(__file__).parent / "assets"

SCRIPTS = ("common.js", "charts.js", "views.js")
"""The scripts of every page, run after plotly as one."""
STYLES = ("page.css", "views.css")
DRAWING = "plotly-basic.min.js"
"""plotly.js 4.1.1 with lines, dots and bars alone, unchanged: a quarter of the whole (MIT, see plotly.LICENSE). A page
holds it packed, which takes less than half."""


PAGE_BYTES = 2_000_000
"""What a page may take unless more was asked for: series are thinned until it fits."""
_DATA = Markup("\0data\0")
"""Where the data goes once the rest is there; no text of a page can be this, as none has a control character."""


def render_document(
    template: str,
    context: Mapping[str, Any],
    *,
    data: Callable[[PageColumns], Mapping[str, Any]],
    styles: Sequence[str] = STYLES,
    limit: float | int = PAGE_BYTES,
) -> str:
    """A page as text, the same for the same input.

    Args:
        template: file name of the jinja template.
        context: what the template shows; every text of it is escaped.
        data: what the scripts read, as JSON, from the columns in which the series of the page are to be stored.
        styles: file names, one style sheet together.
        limit: bytes of the page. Where its series do not fit, each keeps as many points as do; math.inf keeps all.
    """
    style, script = ("".join((_ASSETS / file).read_text("utf-8") for file in files) for files in (styles, SCRIPTS))
    plotly, packed = _plotly()
    page = (
        environment()
        .get_template(template)
        .render(
            **{"place": Anchors(), **context},
            data=_DATA,
            policy=content_security_policy(scripts=(plotly, script), styles=(style,)),
            # Trusted text of this package; everything else on the page is escaped.
            plotly=Markup(packed),
            script=Markup(script),
            style=Markup(style),
        )
    )
    return page.replace(_DATA, _fitting(data, limit - len(page.encode("utf-8", "surrogatepass"))))


def _fitting(data: Callable[[PageColumns], Mapping[str, Any]], room: float | int) -> str:
    """The data as JSON, its series thinned until they fit into so many bytes, or nothing is left to leave out."""
    points: int | None = None
    while True:
        columns = PageColumns(points)
        made = data(columns)
        block = str(htmlsafe_json_dumps(made))  # ASCII alone
        longest = columns.longest
        if len(block) <= room or longest <= FEWEST_POINTS:
            return block
        points = max(FEWEST_POINTS, int(longest * min(0.9, 0.97 * max(room, 0) / len(block))))


@cache
def _plotly() -> tuple[str, str]:
    """plotly.js, whose hash the policy has, and packed, as the page holds it."""
    text = (_ASSETS / DRAWING).read_text("utf-8")
    return text, compressed(text.encode("utf-8"))


def write_document(html: str, path: Path) -> Path:
    """Write a page, whole or not at all; an earlier one is replaced.

    Raises: `RecordError` if it cannot be written.
    """
    write_atomically(path, lambda partial: Path(partial).write_text(html, encoding="utf-8"))
    return path


def content_security_policy(*, scripts: Sequence[str], styles: Sequence[str]) -> str:
    """A policy under which only these inline scripts and style sheets apply, and nothing loads.

    Style *attributes* are allowed: plotly positions its drawings with them. `data:` images are how
    it saves a chart as a picture.

    Reference: Content Security Policy Level 3, section 2.3.1, https://www.w3.org/TR/CSP3/.
    """
    script_hashes = " ".join(map(_hash, scripts))
    style_hashes = " ".join(map(_hash, (*styles, "")))  # "": the empty sheet that plotly fills
    return (
        f"default-src 'none'; script-src {script_hashes}; style-src-elem {style_hashes}; "
        "style-src-attr 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


class CompiledTemplates(BytecodeCache):
    """Keep compiled templates where Python keeps compiled modules: making them takes longer than most pages.

    As for modules, nothing is kept where Python is told not to, or where the folder cannot be written.
    """

    def load_bytecode(self, bucket: Bucket) -> None:
        """Read a compiled template, unless it is of another source or version: a bucket knows."""
        with suppress(OSError, EOFError, ValueError, TypeError), self._file(bucket).open("rb") as file:
            bucket.load_bytecode(file)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Store a compiled template."""
        if sys.dont_write_bytecode:
            return
        compiled = bucket.bytecode_to_string()
        with suppress(RecordError, OSError):
            write_atomically(self._file(bucket), lambda partial: Path(partial).write_bytes(compiled))

    def _file(self, bucket: Bucket) -> Path:
        return Path(cache_from_source(str(_ASSETS / f"{bucket.key}.py")))


@cache
def environment() -> Environment:
    """Jinja as every page of this package uses it: all escaped, nothing undefined, nothing hidden."""
    made = Environment(
        loader=FileSystemLoader(_ASSETS),
        bytecode_cache=CompiledTemplates(),
        autoescape=True,
        undefined=StrictUndefined,
        # The package's own markup stays as it is; any other text is shown without hidden characters.
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "short": short,
        "fixed": fixed,
        "percent": percent,
        "duration": duration,
        "token": visible_token,
        "breakable": breakable,
        "sortable": sortable,
    }
    return made


def breakable(name: str) -> Markup:
    """A name that may go on in the next line after each of its _ and /.

    Example:
        >>> breakable("a_b/<c>")
        Markup('a_<wbr>b/<wbr>&lt;c&gt;')
    """
    return Markup("<wbr>").join(escape(visible(part)) for part in re.split(r"(?<=[_/])", name))


def sortable(words: str) -> float | str:
    """By what the cells of a column are sorted: their last number, else their words, and "" for a dash.

    Example:
        >>> sortable("0.250 → 0.500"), sortable("4.56e−5"), sortable("2,413"), sortable("–"), sortable("falsified")
        (0.5, 4.56e-05, 2413.0, '', 'falsified')
    """
    numbers = re.findall(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-−]?\d+)?", words)
    if numbers:
        return float(numbers[-1].replace("−", "-").replace(",", ""))
    return "" if words == "–" else words


@cache
def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
