"""A run whose every text tries to become markup, script or template."""

from __future__ import annotations

import json
from pathlib import Path

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
