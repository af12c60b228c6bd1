"""A stored audit, judged by other rules than those it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offdrift.audit.conclude import KNOWN, judged, read_audit
from offdrift.audit.metrics_only import judged_metrics
from offdrift.errors import RecordError
from offdrift.judge import Context, Rules
from offdrift.judge.rules_record import choose_rules
from offdrift.records.atomic import plain
from offdrift.show.json_access import at, mapping, number, text

FROM_LOG = (
    "Where the gap is and the certificate are as they were judged from the log; `offdrift audit` judges them again."
)
"""What stored numbers do not hold."""


def audit_judged_by(folder: Path, path: Path | None) -> dict[str, Any]:
    """Read a stored audit; with the path of a rules file, judge it by that in place of the rules that it was made with.

    Raises: `RecordError` as `read_audit` and `rejudged`; `RecipeError` for a rules file that is wrong.
    """
    audit = read_audit(folder)
    if path is None:
        return audit
    chosen = choose_rules(path, audit, str(folder), record="the audit")
    return rejudged(audit, chosen.rules) | {"judged_by": f"{chosen.words} {FROM_LOG}"}


def rejudged(audit: Mapping[str, Any], rules: Rules) -> dict[str, Any]:
    """Judge the numbers of a stored audit by other rules: findings, verdict, suggestion and regime.

    Args:
        audit: content of `audit.json`.

    Raises: `RecordError` if it lacks what rules read, or several steps stand in one row of an audit of metrics.
    """
    stored = mapping(audit.get("context"))
    context = Context(framework=text(at(audit, "source", "framework")), **{k: stored[k] for k in KNOWN if k in stored})
    try:
        if audit.get("evidence") != "metrics":
            return {**audit, **plain(judged(audit, context, rules))}
        if (number(audit.get("steps_per_point")) or 1) > 1:
            raise RecordError("its steps were merged; audit the metrics again with --rules")
        return {**audit, **plain(judged_metrics(audit["steps"], audit["overall"], context, rules))}
    except (KeyError, TypeError, AttributeError) as e:
        raise RecordError(f"the audit cannot be judged again: {e!r} is missing or damaged; audit the log again") from e
