"""`Context`, the facts about a run that a diagnosis may use, and `Finding`, what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Literal

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which configurations of transformers give the number of experts in a layer."""
Row = Mapping[str, Any]
"""Numbers by metric name; None, NaN, infinities and whatever is no number mean missing."""
LARGEST_NUMBER = 1e100
"""Beyond it, a number has no meaning as a metric, and its sums and squares no value."""


def number(row: Row, name: str) -> float | None:
    """A finite number of the row, of at most `LARGEST_NUMBER`; None if there is none of that name."""
    value = row.get(name)
    if type(value) is not float and not isinstance(value, Real):  # the second takes ten times as long
        return None
    try:
        return size if abs(size := float(value)) <= LARGEST_NUMBER else None
    except OverflowError:
        return None


@dataclass(frozen=True, kw_only=True)
class Context:
    """Facts about a run beside its metrics. Everything is optional: None means unknown."""

    framework: str = "offdrift"
    """Whose snippet stands first in a finding: "verl", "trl", "prime-rl", "slime", ..."""
    same_weights: bool | None = None
    """Whether both policies held the same weights by construction: a zero-update test."""
    mixture_of_experts: bool | None = None
    """Whether the model routes tokens to experts."""
    quantized: bool | None = None
    """Whether the engine keeps or multiplies numbers on a coarser grid than its dtype; None: nothing says."""
    method: str | None = None
    """The row of `METHODS` that the run trains with: says which gates and weights are configured."""
    temperature: float | None = None
    """Sampling temperature of the rollouts."""
    filter_replayed: bool | None = None
    """Whether the trainer's policies live on the tokens that the sampler's filters left over; None: unknown, or
    nothing was filtered."""
    filtered: bool | None = None
    """Whether the sampler's filters (top-k, top-p, min-p) left some tokens out; None: nothing states its settings."""
    cache_replayed: bool | None = None
    """Whether the trainer's attention sees the keys that the engine's compressed cache kept; None: unknown, or the
    cache kept all."""
    raw_stated: bool | None = None
    """Whether the log says that its rollout log-probs are those before temperature and filters; None: unknown."""
    metrics_only: bool = False
    """Whether all that is known are metrics that another program logged: then no cause has high confidence, and none
    is a fact."""
    overall: Row = field(default_factory=dict)
    """Metrics over all tokens of the run."""
    shapes: Mapping[str, Any] = field(default_factory=dict)
    """Where the gap is and how it goes over the steps (`audit.shape_table`); empty of metrics alone."""
    facets: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    """Metrics by bucket of a property ("length", "lag", "worker", "drawn_by", ...): rows with "label", and "low", its
    smallest value."""
    since: Sequence[Mapping[str, Any]] = ()
    """Parts of the log since a metric changed at one step: rows with "step", "steps" and "overall", as of the log."""


def num_experts(model: Any) -> int:
    """Experts in each layer of a mixture of experts, by the model's configuration; 0 for a dense model."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return max(getattr(config, name, None) or 0 for name in EXPERT_COUNTS)


Severity = Literal["info", "watch", "act", "stop"]
"""How urgent: for your information; keep an eye on it; correct it; do not train on.

Of a run that is going on, a forecast: see `judge.track_record`."""
URGENCY: tuple[Severity, ...] = ("stop", "act", "watch", "info")
"""Severities, the most urgent first."""

Confidence = Literal["low", "medium", "high"]
Relation = Literal["<", "<=", ">", ">=", "=", "missing"]
Scale = Literal["number", "share", "times", "yes"]


HALF = "half of yours"
"""What a snippet says beside a number that depends on the run."""


@dataclass(frozen=True)
class Evidence:
    """One measured number beside the threshold that it was compared with."""

    metric: str
    value: float | None
    """None if the evidence is that the number is missing."""
    relation: Relation
    threshold: float | None
    unit: str = "1"
    source: str = ""
    """Where the threshold comes from."""
    what: str = ""
    """The quantity that was compared, in words, where it is not the metric itself but derived from it."""
    scale: Scale = "number"
    """How both numbers are written: as they are, in percent, as multiples, or as yes and no."""


@dataclass(frozen=True)
class Finding:
    """One rule that fired."""

    rule: str
    """Name of the rule, an identifier."""
    cause: str
    """Name of the most likely cause, an identifier (`precision`, `stale_engine`, ...)."""
    letter: str
    """The survey's class of it: "A" to "F"; "A/B" where only a measurement could tell; "" if it has none."""
    severity: Severity
    confidence: Confidence
    symptom: str
    """One sentence: what is seen."""
    evidence: tuple[Evidence, ...]
    explanation: str
    """One or two sentences: the most likely cause, and why it looks like this."""
    fix: str
    """One sentence: the smallest change that helps."""
    refuted_by: str
    """What would show that this finding is wrong."""
    decides: str = ""
    """One sentence: the measurement that tells this cause from the others; "" if the finding is certain."""
    fact: bool = False
    """Whether arithmetic proves it, so that no cause has to be believed."""
    snippets: Mapping[str, str] = field(default_factory=dict)
    """The fix as configuration, by framework ("verl", "trl", "prime-rl", "slime", "offdrift", ...)."""
    method: str | None = None
    """The row of `METHODS` that the fix turns on, if it is a correction."""
    source: str = ""
    """Where the rule comes from."""
    record: str = ""
    """What became of training runs with this finding (`judge.track_record`), in a sentence; "" if too few had it."""
    step: int | None = None
    """The first step of the run at which it fired; None if it is about the whole."""
    steps: int = 0
    """At how many steps it fired."""

    def as_a_hint(self) -> Finding:
        """The finding with low confidence, and to be watched at most."""
        severity = max(self.severity, "watch", key=URGENCY.index)
        return replace(self, severity=severity, confidence="low")

    def as_dict(self) -> dict[str, Any]:
        """The finding as plain data, for JSON."""
        return asdict(self)
