"""`Alarm`: one finding as it leaves this machine, as JSON, as a chat message, and as environment variables.

Words of a finding may come from a log (names of workers, arms and files), so nothing here is ever part of a program:
a command gets values, a chat message gets escaped text.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offdrift.judge.findings import URGENCY
from offdrift.judge.verdict import deciding_measurement
from offdrift.records.atomic import plain
from offdrift.show.findings import WORDS
from offdrift.show.json_access import Fields, clipped, mapping, number, rows, text, visible

LONGEST = 4000
"""Characters of one text of an alarm: an environment variable may have 128 KiB, a chat message 40,000 characters."""


@dataclass(frozen=True)
class Alarm:
    """One finding, and where it was made.

    Example:
        >>> finding = {"rule": "stale", "severity": "act", "symptom": "The engine is behind.", "step": 40}
        >>> alarm = Alarm("runs/a", "none", finding, "file:///runs/a")
        >>> alarm.environment()["OFFDRIFT_WHAT"], alarm.environment()["OFFDRIFT_STEP"]
        ('The engine is behind.', '40')
    """

    run: str
    """Path of what is watched."""
    source: str
    """Arm of a run, or "log" or "metrics"."""
    finding: Mapping[str, Any]
    """Of `Finding.as_dict`."""
    link: str = ""
    """Address where the finding can be read."""

    @property
    def level(self) -> str:
        """Severity: "stop", "act", "watch" or "info"."""
        severity = text(self.finding.get("severity"))
        return severity if severity in URGENCY else "info"

    @property
    def id(self) -> str:
        """Name of this finding of this run: rule, step and the numbers that were measured, as a digest.

        A watch that reads the same log again makes the same name, one that reads another log in its place another.
        """
        numbers = [(text(e.get("metric")), number(e.get("value"))) for e in rows(self.finding.get("evidence"))]
        parts = [self.run, self.source, text(self.finding.get("rule")), number(self.finding.get("step")), numbers]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def words(self, name: str) -> str:
        """Return a text of the finding as people may see it: nothing hidden in it, on one line, and not too long."""
        return clipped(visible(text(self.finding.get(name)).replace("\n", " ")), LONGEST)

    def fields(self) -> dict[str, str]:
        """Every part of the alarm as text; a part that the finding lacks is ""."""
        step = number(self.finding.get("step"))
        fix, decides = self.words("fix"), self.words("decides")
        return {
            "level": self.level,
            "what": self.words("symptom"),
            "why": self.words("explanation"),
            "fix": fix,
            "confirm": deciding_measurement(fix, decides),
            "link": visible(self.link),
            "run": visible(self.run),
            "source": clipped(visible(self.source), LONGEST),
            "step": "" if step is None else f"{step:.0f}",
            "rule": self.words("rule"),
            "cause": self.words("cause"),
            "confidence": self.words("confidence"),
            "host": socket.gethostname(),
            "id": self.id,
        }

    def environment(self) -> dict[str, str]:
        """Return `fields` as variables, OFFDRIFT_WHAT and so on, without a zero byte, which none can hold."""
        return {f"OFFDRIFT_{name.upper()}": value.replace("\0", "") for name, value in self.fields().items()}

    def as_dict(self) -> dict[str, Any]:
        """Return `fields`, the message as `text`, and the finding itself, as plain data for JSON."""
        parts: dict[str, Any] = self.fields()
        parts["step"] = number(self.finding.get("step"))
        return {"text": self.message(), **parts, "finding": plain(mapping(self.finding))}

    def message(self) -> str:
        """Return what, why, fix and link as a chat message in Slack's mrkdwn, which Mattermost and others read, too.

        `&`, `<` and `>` are escaped, so that no text of a log becomes a link or calls a channel.

        Reference: Slack, "Formatting text for app surfaces", escaping text.
        """
        part = {name: _escaped(value) for name, value in self.fields().items()}
        sign, word, _ = WORDS[self.level]
        at = f", step {part['step']}" if part["step"] else ""
        lines = [
            f"{sign} *{word}: {part['what'] or part['cause'] or part['rule']}*",
            f"{part['run']} ({part['source']}{at}) on {part['host']}",
            *([f"Measured: {_escaped(measured(self.finding))}"] if measured(self.finding) else []),
            *([f"Why: {part['why']}"] if part["why"] else []),
            *([f"Fix: {part['fix']}"] if part["fix"] else []),
            *([f"To confirm: {part['confirm']}"] if part["confirm"] else []),
            *([f"<{part['link'].replace('|', '%7C')}>"] if "://" in part["link"] else []),
        ]
        return "\n".join(lines)


def measured(finding: Fields) -> str:
    """Evidence of a finding in one line: what was measured, beside its threshold.

    Example:
        >>> measured({"evidence": [{"metric": "full/k3", "value": 0.25, "relation": ">", "threshold": 0.05,
        ...                         "unit": "nat"}]})
        'full/k3 = 0.25 nat (> 0.05)'
    """
    parts = []
    for row in rows(finding.get("evidence")):
        value, limit, unit = number(row.get("value")), number(row.get("threshold")), text(row.get("unit"))
        size = "not logged" if value is None else f"{value:.3g}{f' {unit}' if unit not in ('', '1') else ''}"
        beside = f" ({text(row.get('relation'))} {limit:.3g})" if limit is not None else ""
        parts.append(f"{visible(text(row.get('metric')))} = {size}{beside}")
    return ", ".join(parts)


def _escaped(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
