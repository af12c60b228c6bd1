"""What an audit concludes: numbers, findings, a verdict, a suggestion and a certificate, as JSON.

`audit.json` holds everything that the page and the comparison of two runs show; neither reads the
log again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offdrift.audit.certificate_evidence import Proof
from offdrift.audit.coverage import coverage, metrics
from offdrift.audit.partial import Job, Part
from offdrift.audit.questions import questions
from offdrift.audit.suggest import suggest
from offdrift.errors import RecordError
from offdrift.judge import Context, Rules, diagnose, load_rules, verdict
from offdrift.records.atomic import plain, write_json

FORMAT = 1
FILE_NAME = "audit.json"


def conclude(part: Part, job: Job, *, context: Context | None = None, rules: Rules | None = None) -> dict[str, Any]:
    """The content of `audit.json`.

    Args:
        part: everything that was read.
        context: what is known about the run besides its log.
        rules: the diagnosis' rules, if not the built-in ones.

    Raises: `RecordError` if no row could be read, naming the first bad one.
    """
    if part.tally is None:
        raise RecordError(_nothing_read(part, job))
    told = part.tally.as_dict()
    seen = coverage(part, files=len(job.found.files) + len(job.found.skipped), size=job.found.bytes)
    overall, facets = {**told["overall"], **metrics(seen)}, told["facets"]
    limits = (rules or load_rules()).limits
    methods = [] if part.counterfactual is None else part.counterfactual.table()
    known = context or Context(framework=job.found.framework)
    known = _with_facets(known, overall, facets)
    findings = diagnose([_numbers(step) for step in told["steps"]], context=known, rules=rules)
    has = {*told["has"], *(["exact"] if _has_exact(told["has"]) else [])}
    return plain({
        "format": FORMAT,
        "kind": "audit",
        "offdrift": version("offdrift"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "source": _source(job),
        "coverage": seen,
        **told,
        "overall": overall,
        "counts": {**told["counts"], "bad_rows": part.unread.rows},
        "bad_rows": [b._asdict() for b in part.bad],
        "questions": questions(has),
        "methods": methods,
        "limits": limits,
        "suggestion": suggest(methods, overall, limits=limits),
        "findings": [f.as_dict() for f in findings],
        "verdict": verdict(findings, overall, missing=seen["said"]),
        "certificate": (part.proof or Proof.nothing()).as_dict(),
    })  # fmt: skip


def read_audit(path: Path) -> dict[str, Any]:
    """A stored audit: its folder, or the file in it.

    Raises: `RecordError` if there is none, or it is not an audit of a format known here.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise RecordError(f"{path} holds no audit ({e}); run `offdrift audit` first") from e
    if not isinstance(held, dict) or held.get("kind") != "audit":
        raise RecordError(f"{file} is not an audit; give the folder that `offdrift audit` wrote")
    if held.get("format") != FORMAT:
        raise RecordError(f"{file} has format {held.get('format')}, this version reads {FORMAT}; audit the log again")
    return held


def write_audit(result: Mapping[str, Any], folder: Path) -> Path:
    """Store an audit in its folder, whole or not at all."""
    write_json(folder / FILE_NAME, result)
    return folder / FILE_NAME


def _source(job: Job) -> dict[str, Any]:
    found = job.found
    return {
        "detected": found.said,
        "format": found.format,
        "framework": found.framework,
        "files": len(found.files),
        "bytes": found.bytes,
        "paths": list(found.files[:20]),
        "columns": dict(found.columns),
        "sample_rate": job.sample_rate,
    }


def _nothing_read(part: Part, job: Job) -> str:
    if part.bad:
        first = part.bad[0]
        return (
            f"no row could be read as {job.found.format}: {part.unread.rows} bad rows, the first at "
            f"{first.file}:{first.row} ({first.reason})" + ("; name the columns with --columns" if first.row else "")
        )
    return f"the files hold no row ({', '.join(job.found.files[:3])})"


def _numbers(step: Mapping[str, Any]) -> dict[str, float | int]:
    return {k: v for k, v in step.items() if isinstance(v, (int, float))}


def _has_exact(has: Sequence[str]) -> bool:
    return any(name.startswith(("kl_", "tv_")) for name in has)


def _with_facets(context: Context, overall: Mapping[str, float], facets: Mapping[str, Any]) -> Context:
    rows = {axis: [_numbers(row) for row in buckets] for axis, buckets in facets.items()}
    return replace(context, overall=overall, facets=rows, by_lag=rows.get("lag", ()))
