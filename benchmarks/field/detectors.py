"""Detectors: callables and commands that take the path of a log and return causes, confidence, severity and fix.

A detector of one's own is `module:function`, called with the path of a folder, or a command in which `{log}` stands for
it and which prints a JSON object as its last line. Both return

    {"causes": [ranked, plain vocabulary], "confident": bool, "abstains": bool, "severity": "ok|watch|act|stop", "fix": [...]}
"""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
import tempfile
import tomllib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.field.score import SEVERITIES, Answer

Detector = Callable[[Path], Answer]
TABLE = Path(__file__).with_name("offdrift.toml")


def named(name: str) -> Detector:
    """The detector that a command line names: `offdrift`, `module:function`, or a command with `{log}`."""
    if name == "offdrift":
        return offdrift
    if "{log}" in name:
        return lambda path: command(name, path)
    module, _, function = name.partition(":")
    found = getattr(importlib.import_module(module), function)
    return lambda path: Answer.of(found(path))


def command(template: str, path: Path) -> Answer:
    """Run a command on a log; raises `RuntimeError` with its output where it fails."""
    words = [w.replace("{log}", str(path)) for w in shlex.split(template)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-500:]}")
    return Answer.of(json.loads(done.stdout.strip().splitlines()[-1]))


@lru_cache
def table() -> dict[str, Any]:
    """What findings mean in the plain vocabulary."""
    return tomllib.loads(TABLE.read_text())


def audited(path: Path) -> dict[str, Any]:
    """audit.json of a log, by the command line of this library, in this process."""
    from typer.testing import CliRunner

    from offdrift.cli import application

    with tempfile.TemporaryDirectory() as out:
        done = CliRunner().invoke(application("audit"), ["audit", str(path), "--out", out, "--no-color", "-q"])
        found = Path(out) / "audit.json"
        if not found.exists():
            raise RuntimeError(f"offdrift audit {path} wrote no audit.json: {done.output[-500:]} {done.exception!r}")
        audit: dict[str, Any] = json.loads(found.read_text())
        return audit


def meaning(finding: dict[str, Any]) -> dict[str, Any]:
    """What a finding says in the plain vocabulary: by its rule, else by its cause, else `unmapped`."""
    known = table()
    found = known["rules"].get(finding["rule"]) or known["causes"].get(finding.get("cause", ""))
    return found or {"cause": "unmapped"}


def offdrift(path: Path) -> Answer:
    """What this library's audit says of a log: its findings in their order."""
    return answer(audited(path))


def answer(audit: dict[str, Any]) -> Answer:
    """Translate audit.json by the table of findings."""
    findings = audit["findings"]
    meanings = [meaning(f) for f in findings]
    said = "; ".join(f"{f['rule']} [{f.get('cause')}] {f['severity']}/{f.get('confidence')}" for f in findings)
    if not findings:
        return Answer(("none",), confident=True, abstains=False, severity="ok", fix=("nothing",))
    causes = tuple(dict.fromkeys(m["cause"] for m in meanings))
    severity = max((f["severity"] for f in findings), key=SEVERITIES.index)
    fix = meanings[0].get("fix", ())
    return Answer(
        causes=causes,
        confident=findings[0].get("confidence") == "high",
        abstains=bool(meanings[0].get("asks", False)),
        severity=severity,
        fix=(fix,) if isinstance(fix, str) else tuple(fix),
        detail=said,
    )
