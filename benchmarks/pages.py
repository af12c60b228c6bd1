"""How large pages are and how long a browser takes to open them: one line a page, and JSON.

Five pages are written from stored numbers of a run of `--steps` steps (report: four arms; sweep: four settings and
three seeds; audit: as many points as audits store; check and plan have no steps), each is opened several times from
`file://` in a tab of headless Chromium at 1280 x 800. Read from the browser's own clock, from the start of the
navigation: when text is painted, when the charts on the screen are drawn and the page answers, and when all are; and
the processor time of it.

    python -m benchmarks.pages
    python -m benchmarks.pages --steps 1000 --opens 3 --keep runs/pages

Needs Chromium. The numbers are those of the machine; other load on it counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.show.browser import Browser, browser
from tests.show.synthetic import write_run
from tests.show.synthetic_audit import audit, check, planned
from tests_lab.train.sweeps import BASE, fill, sweep_of

from offdrift.audit.page import write_audit_page
from offdrift.check.page import write_check_page
from offdrift_lab.plan.page import write_plan_page
from offdrift_lab.train.report.page import write_report, write_sweep

RESULTS = Path(__file__).parent / "results" / "pages.json"
STORED_POINTS = 2000
"""Points that an audit stores at most (`offdrift.audit.tally.MAX_POINTS`)."""
ON_NEW_PAGE = """
new MutationObserver(changes => {
  for (const change of changes) window[`__${change.attributeName}`] ??= performance.now();
}).observe(document, { attributes: true, subtree: true, attributeFilter: ["data-begun", "data-drawn"] });
"""
CLOCK = """[
  performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null,
  performance.getEntriesByType("navigation")[0].domContentLoadedEventEnd,
  window["__data-begun"] ?? null,
  window["__data-drawn"],
]"""


def write_all(folder: Path, steps: int) -> dict[str, Path]:
    """One page of each kind.

    Args:
        steps: updates of the run and of every run of the sweep, and steps of the audit.
    """
    pages = {"report": write_report(write_run(folder / "report", updates=steps))}
    width = 1
    while steps / width > STORED_POINTS:
        width *= 2
    pages["audit"] = write_audit_page(audit(steps=steps // width) | {"steps_per_point": width}, folder / "audit")
    pages["check"] = write_check_page(check(), folder / "check")
    pages["plan"] = write_plan_page(planned("two devices"), folder / "plan.html")
    (folder / "sweep").mkdir(parents=True, exist_ok=True)
    base = BASE.replace("batches = 4", f"batches = {steps}").replace("eval_every = 2", f"eval_every = {steps // 10}")
    grid = sweep_of(folder / "sweep", "seeds = 3\n[values]\nlag.sync_every = [1, 2]", base=base)
    fill(grid, lambda setting, seed, update: 0.1 * seed + (hash((setting.name, seed, update)) % 1000) / 2000)
    pages["sweep"] = write_sweep(grid)[1]
    return pages


def stored(folder: Path) -> dict[str, Path]:
    """The pages of an earlier `write_all`; none if one is missing."""
    files = {
        "report": "report/report.html",
        "audit": "audit/report.html",
        "check": "check/check.html",
        "plan": "plan.html",
        "sweep": "sweep/out/sweep.html",
    }
    pages = {name: folder / file for name, file in files.items()}
    return pages if all(page.is_file() for page in pages.values()) else {}


def worked(chrome: Browser) -> float:
    """Milliseconds of processor time that the page's thread has taken so far: what other processes do not lengthen."""
    metrics = {m["name"]: m["value"] for m in chrome.send("Performance.getMetrics")["metrics"]}
    return 1000 * metrics["TaskDuration"]


def opened(chrome: Browser, page: Path, times: int) -> dict[str, Any]:
    """Size of a page, and medians and extremes of the milliseconds until text, script and charts are there."""
    readings = []
    for _ in range(times):
        chrome.open(Path("/dev/null"), wait=False)
        before = worked(chrome)
        chrome.open(page.resolve())
        readings.append([*chrome.run(CLOCK), worked(chrome) - before])
    paint, script, begun, drawn, work = zip(*readings, strict=True)
    text = page.read_text("utf-8")
    return {
        "bytes": len(text.encode()),
        "charts": chrome.run("document.querySelectorAll('.plot').length"),
        "points": chrome.run("[...document.querySelectorAll('.plot')].flatMap(p => p.data ?? []).reduce((n, t) => n + t.x.length, 0)"),
        "paint_ms": None if None in paint else statistics.median(paint),
        "script_ms": statistics.median(script),
        "screen_ms": None if None in begun else {"median": statistics.median(begun), "least": min(begun), "most": max(begun)},
        "drawn_ms": {"median": statistics.median(drawn), "least": min(drawn), "most": max(drawn)},
        "work_ms": statistics.median(work),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="steps of the run (default 10,000)")
    parser.add_argument("--opens", type=int, default=7, help="how often each page is opened (default 7)")
    parser.add_argument(
        "--keep", type=Path, help="folder for the pages, which are opened again if they are there; absent, deleted"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the numbers go, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch) / "pages"
        started = time.perf_counter()
        pages = stored(folder) or write_all(folder, args.steps)
        print(f"wrote {len(pages)} pages in {time.perf_counter() - started:.1f} s", flush=True)
        table = {}
        with browser(Path(scratch) / "profile") as chrome:
            chrome.send("Page.addScriptToEvaluateOnNewDocument", source=ON_NEW_PAGE)
            chrome.send("Performance.enable", timeDomain="threadTicks")
            version = chrome.send("Browser.getVersion")["product"]
            print("milliseconds, medians and extremes; screen: what is on the screen is drawn; all: every chart is")
            print(f"{'page':8}{'bytes':>12}{'charts':>8}{'screen':>22}{'all':>22}{'work':>8}")
            for name, page in pages.items():
                row = table[name] = opened(chrome, page, args.opens)
                screen, drawn = (
                    f"{t['median']:.0f} ({t['least']:.0f} to {t['most']:.0f})" if t else "–"
                    for t in (row["screen_ms"], row["drawn_ms"])
                )
                print(
                    f"{name:8}{row['bytes']:12,}{row['charts']:8}{screen:>22}{drawn:>22}{row['work_ms']:8.0f}",
                    flush=True,
                )
    result = {
        "steps": args.steps,
        "opens": args.opens,
        "browser": version,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "pages": table,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"numbers: {args.out}")


if __name__ == "__main__":
    main()
