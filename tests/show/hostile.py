"""Runs, audits and checks whose every text tries to become markup, script, template or a terminal's commands."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests_lab.train.sweeps import fill, reward, sweep_of

from offdrift_lab.train.report.page import render_sweep
from offdrift_lab.train.sweep.sweep_results import results
from tests.show.synthetic import write_lines

MARK = "document.documentElement.dataset.pwned=1;window.__pwned=1"
PAYLOADS = (
    f"<script>{MARK}</script>",
    f'"><img src=x onerror="{MARK}">',
    f"' onmouseover='{MARK}",
    "</script>",
    "</pre></style></title><!--",
    "{{7*7}}{% raw %}",
    "&lt;b&gt;&amp;",
    "a\u2028b\u2029c",
    "\u202ereversed\u0000",
    "lone \ud800 half",
)
"""Each is stored in every place below; a page must show each as text."""

SHOWN = (*PAYLOADS[:7], "a\\u2028b\\u2029c", "\\u202ereversed\\u0000", "lone \\ud800 half")
"""What a reader sees of each: invisible characters as their codes, the rest as it is."""


def write_hostile_run(run_dir: Path) -> Path:
    """Write a run with the payloads in every text that a run can hold."""
    run_dir.mkdir(parents=True, exist_ok=True)
    names = [f"arm {i} {payload}" for i, payload in enumerate(PAYLOADS)]
    for i, (name, payload) in enumerate(zip(names, PAYLOADS)):
        _write_arm(run_dir / "arms" / str(i), name, payload)
    head = {
        "format": 1,
        "name": "".join(PAYLOADS),
        "recipe": {f"key {p}": {"inner": p, "list": [p]} for p in PAYLOADS},
        "started": "".join(PAYLOADS),
        "versions": {f"package {p}": p for p in PAYLOADS},
        "model": {"name": "".join(PAYLOADS), "parameters": "".join(PAYLOADS)},
    }
    (run_dir / "run.json").write_text(json.dumps(head))
    return run_dir


def _write_arm(folder: Path, name: str, payload: str) -> None:
    metrics = [{"update": u, "reward/mean": 0.1 * u, payload: payload} for u in range(3)]
    write_lines(folder / "metrics.jsonl", metrics)
    samples = [
        {
            "update": 0,
            "prompt": f"prompt {payload}",
            "finish": f"finish {payload}",
            "tokens": list(PAYLOADS),
            "kl": [10.0**-i for i in range(len(PAYLOADS))],
        }
    ]
    write_lines(folder / "samples.jsonl", samples)
    texts = ("method", "description", "grade")
    summary = {"arm": name, "notes": [f"note {payload}"]} | {k: f"{k} {payload}" for k in texts}
    (folder / "summary.json").write_text(json.dumps(summary))


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """The same content with every text in it changed; keys that code reads stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: replaced(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replaced(v, change) for v in value]
    return value


def hostile(content: Mapping[str, Any], payload: str) -> dict[str, Any]:
    """The content with a payload behind every text, and as a key wherever a key is a name.

    Levels, statuses and what else is one of a few words stay: changed, they would hide what they
    are about.
    """
    changed = replaced(content, lambda words: words + payload)
    for a, b in zip(_findings(changed), _findings(content)):
        a |= {"severity": b["severity"], "snippets": {payload: f"snippet {payload}"}}
        a["evidence"] = [{"metric": payload, "value": 1.0, "relation": payload, "threshold": 2.0, "unit": payload, "source": payload}]  # fmt: skip
    if content.get("verdict"):
        changed["verdict"]["level"] = content["verdict"]["level"]
    for name in ("overall", "baseline", "counts", "certificate", "noise"):
        if isinstance(changed.get(name), dict):
            changed[name][payload] = 1.0
    if isinstance(changed.get("source"), dict):
        changed["source"] |= {"columns": {f"column {payload}": payload}, "paths": [f"/data/{payload}"]}
    for row in changed.get("steps") or []:
        row[payload] = 1.0
    for mine, its in zip(changed.get("factors") or [], content.get("factors") or []):
        mine["status"] = its["status"]
    for row in (changed.get("methods") or [])[::2]:
        row["why_not"] = None
    return changed


def _findings(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return content.get("findings") or []


def swept(folder: Path, payload: str = "") -> Path:
    """The page of a sweep of two arms with two values; the payload stands behind every text of its results."""
    folder.mkdir(parents=True, exist_ok=True)
    grid = sweep_of(folder, "seeds = 3\n[values]\nlag.sync_every = [1, 2]")
    fill(grid, reward)
    failed = grid.cells[-1]
    (failed.files.path / "summary.json").unlink()
    (failed.folder / "error.json").write_text(json.dumps({"error": f"RuntimeError: {payload}"}))
    document = results(grid)
    names = {"metric", "status", "verdict"}
    if payload:
        for row in (*document["settings"], *document["runs"]):
            row |= {
                key: f"{value}{payload}" for key, value in row.items() if isinstance(value, str) and key not in names
            }
            row["values"] = {f"{key}{payload}": payload for key in row["values"]}
        document |= {
            "name": payload,
            "versions": [{payload: payload}],
            "sweep": document["sweep"] | {"recipe": payload},
        }
    page = folder / "sweep.html"
    page.write_text(render_sweep(grid, document), encoding="utf-8")
    return page
