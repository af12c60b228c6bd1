"""Prometheus' text format: families of samples with labels, whose values may hold any text.

Reference: Prometheus, "Exposition formats", text-based format 0.0.4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Family:
    """Samples of one name."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    """What it is, with its unit."""
    samples: list[tuple[Mapping[str, str], float | int]] = field(default_factory=list)
    """Labels and value of each."""


def exposition(families: Iterable[Family]) -> str:
    r"""Return families as text; those without a sample are left out.

    Example:
        >>> print(exposition([Family("up", "gauge", "Whether.", [({"a": 'x"\n'}, 1)])]), end="")
        # HELP up Whether.
        # TYPE up gauge
        up{a="x\"\n"} 1
    """
    lines = []
    for family in families:
        if not family.samples:
            continue
        help_text = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {family.name} {help_text}", f"# TYPE {family.name} {family.kind}"]
        for labels, value in family.samples:
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
            lines.append(f"{family.name}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def metric_name(name: str) -> str:
    """Return the name under which a metric is served: with `offdrift_` before it, other characters as _.

    Example:
        >>> metric_name("full/k3"), metric_name("reward/mean")
        ('offdrift_full_k3', 'offdrift_reward_mean')
    """
    return "offdrift_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _escaped(value: str) -> str:
    """A label's value; half surrogates, which UTF-8 has not, as question marks."""
    words = value.encode("utf-8", "replace").decode("utf-8")
    return words.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float | int) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
