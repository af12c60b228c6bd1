"""Divergence that precision explains: the training engine against transformers at the rollout engine's dtype.

A fault of a few per cent in one layer, a stale head or an adapter that was not merged stays far below every threshold
of health. It shows beside what rounding does to the same model on the same tokens: transformers decodes them at the
rollout engine's dtype, and the measured divergence is held against its.

    D_t = KL_t where it is exact, else (log pi_t - log mu_t)^2 / 2        of each token, measured and explained

Both means are of the same tokens. The excess is a finding if the mean of D - m D' lies `precision_z` standard errors
above 0 (clustered by sequence), m a stated multiple of what rounding explains; or if it holds in nearly every sequence;
or, between two engines in float32, in `precision_sequences` sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from offdrift.check.bench import DTYPES, Bench, EngineSpec
from offdrift.check.factors.base import few
from offdrift.check.finding import act_finding
from offdrift.check.measure import Measured, clustered_error, measured
from offdrift.engines import make_engine
from offdrift.judge import Evidence, Finding, load_rules
from offdrift.records.batch import Logged
from offdrift.records.rollouts import FullVocab, HiddenStates, Rollouts
from offdrift.segments import Segments

FLOOR = 2.6e-13
"""Mean KL of two float32 engines on a tiny model, nat per token; no engine is held to less."""
SEQUENCES = 16
"""Sequences that are decoded again, at most."""
TOO_NEAR = 0.2
"""Measured over explained, below which an engine that states no dtype does not compute in bfloat16: engines that do
stand at 0.3 to 1.1 (docs/check.md)."""


@dataclass(frozen=True)
class Explained:
    """Measured divergence beside what precision explains; NaN where it was not compared."""

    dtype: str
    why: str = ""
    """Why it was not compared."""
    measured: float = math.nan
    """Mean of D over the tokens that were decoded again, nat."""
    explained: float = math.nan
    """Mean of D', and `FLOOR` at least."""
    multiple: float = math.nan
    """m: up to here precision may be it."""
    z: float = math.nan
    """Mean of D - m D' over its standard error."""
    share: float = math.nan
    """Share of sequences whose mean of D exceeds m times that of D'."""
    tokens: int = 0
    sequences: int = 0
    exact: bool = True
    """Whether D is the exact KL, not that of the drawn tokens' log-ratios."""
    stated: bool = True
    """Whether the engine states this dtype; else it is bfloat16, as servers that say nothing use, or float32 where the
    numbers are too near for that."""
    limits: Mapping[str, float] = field(default_factory=lambda: load_rules().limits)
    """Thresholds by name (`Rules.limits`)."""

    @property
    def ratio(self) -> float:
        """Measured over explained."""
        return self.measured / self.explained

    @property
    def exceeded(self) -> bool:
        """Whether weights or configuration differ: precision does not explain the divergence."""
        if not self.ratio > self.multiple:
            return False
        signs = (self.share - 0.5) * 2 * math.sqrt(self.sequences)
        # A stale expert is in a few sequences; in float32 no router chooses otherwise by rounding.
        in_float32 = self.multiple >= self.limits["precision_times_float32"]
        several = in_float32 and self.share * self.sequences >= self.limits["precision_sequences"]
        return self.z > self.limits["precision_z"] or signs > self.limits["precision_sign_z"] or several

    def as_dict(self) -> dict[str, Any]:
        """Entry of `check.json`."""
        fields = ("dtype", "why", "measured", "explained", "ratio", "multiple", "z", "share", "tokens", "sequences")
        named = {name: getattr(self, name) for name in fields}
        return named | {"exact": self.exact, "stated": self.stated, "exceeded": self.exceeded}


def explained(
    bench: Bench,
    rollouts: Rollouts,
    baseline: Measured,
    train: EngineSpec,
    *,
    stated: bool = True,
    limits: Mapping[str, float] | None = None,
) -> Explained:
    """Decode the baseline's first sequences with transformers at the rollout engine's dtype, and compare.

    Where the training engine is not in float32, its own rounding counts too: what is explained is the larger of the
    decoded tokens' divergence from the training engine, and from float32.

    Args:
        stated: whether the rollout engine states its dtype; see `Explained.stated`.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.
    """
    limits = load_rules().limits if limits is None else limits
    provenance = rollouts.provenance
    dtype = DTYPES.get(provenance.dtype)
    if why := not_compared(rollouts, dtype):
        return Explained(provenance.dtype, why)
    assert dtype is not None
    found = _decoded_at(dtype, bench, rollouts, baseline, train=train, limits=limits)
    if not stated and found.ratio < TOO_NEAR:
        found = _decoded_at("float32", bench, rollouts, baseline, train=train, limits=limits)
    return replace(found, stated=stated)


def _decoded_at(
    dtype: str, bench: Bench, rollouts: Rollouts, baseline: Measured, *, train: EngineSpec, limits: Mapping[str, float]
) -> Explained:
    """The baseline beside transformers at one dtype."""
    log = baseline.logged
    assert log is not None
    some = few(rollouts, sequences=SEQUENCES, v=bench.vocab_size)
    here = divergence_of(log)[: len(some.tokens)]
    engine: Any = make_engine("transformers", bench.model, dtype=dtype)
    try:
        kind = "hidden" if isinstance(some.evidence, HiddenStates) else "full"
        again = engine.rescore(some, evidence=kind)
    finally:
        engine.close()
    exact = "kl_rollout_old" in log.divergences
    logs = [measured(again, bench.score(again, train)).logged]
    if train.dtype != "float32":
        logs.append(measured(again, bench.score(again, EngineSpec("transformers", "float32"))).logged)
    there = max((divergence_of(x, exact=exact) for x in logs if x is not None), key=lambda d: float(d.mean()))
    both = {DTYPES.get(dtype, dtype), DTYPES.get(train.dtype, train.dtype)}
    multiple = multiple_of("float32" if both == {"float32"} else "half", limits)
    return compared(here, there, Segments(some.cu_seqlens), dtype=dtype, multiple=multiple, exact=exact, limits=limits)


def multiple_of(dtype: str, limits: Mapping[str, float]) -> float:
    """m of a precision: up to so many times what it explains, a mismatch may be its rounding."""
    return limits["precision_times_float32"] if dtype == "float32" else limits["precision_times_half"]


def compared(
    here: Float[Tensor, " n"],
    there: Float[Tensor, " n"],
    segments: Segments,
    *,
    dtype: str,
    multiple: float,
    exact: bool,
    limits: Mapping[str, float],
) -> Explained:
    """Measured and explained divergence of the same tokens, side by side."""
    there = there.double().clamp(min=0.0) + FLOOR
    excess = here - multiple * there
    several = len(segments.lengths) > 1
    error = clustered_error(excess, segments if several else Segments.from_lengths([1] * len(excess)))
    above = segments.mean(excess)[segments.lengths > 0] > 0
    mean = float(excess.mean())
    return Explained(
        dtype,
        measured=float(here.mean()),
        explained=float(there.mean()),
        multiple=multiple,
        z=mean / error if error > 0 else math.copysign(math.inf, mean),
        share=float(above.double().mean()),
        tokens=len(here),
        sequences=len(above),
        exact=exact,
        limits=limits,
    )


def divergence_of(log: Logged, *, exact: bool = True) -> Float[Tensor, " n"]:
    """D of every token, nats, float64."""
    if exact and "kl_rollout_old" in log.divergences:
        return log.divergences["kl_rollout_old"].double()
    assert log.logp_rollout is not None
    assert log.logp_old is not None
    return (log.logp_old - log.logp_rollout).double().square() / 2


def not_compared(rollouts: Rollouts, dtype: str | None) -> str:
    """Reason why transformers cannot stand beside this engine; "" if it can."""
    provenance = rollouts.provenance
    if dtype is None:
        return f"the engine does not say its dtype ({provenance.dtype!r}); name it: openai:URL,dtype=bfloat16"
    if provenance.quantization is not None:
        return f"transformers has no {provenance.quantization} that rounds alike, so what it explains is not known"
    odd = {"a teacher": provenance.teacher, "a cache that forgets": provenance.eviction}
    if provenance.logprobs == "raw" and (provenance.sampling.temperature != 1 or provenance.sampling.filtered):
        return "the log-probs are raw"
    if provenance.sampling.filtered and not isinstance(rollouts.evidence, FullVocab):
        return "a filter was applied that the record does not show"
    return next((f"the engine has {name}" for name, value in odd.items() if value is not None), "")


PRECISION = "precision"
"""Cause in the rules that a comparison with transformers at the same dtype can refute."""


def unexplained(found: Explained) -> list[Finding]:
    """Finding that weights or configuration differ, where precision does not explain the divergence."""
    if not found.exceeded:
        return []
    symptom = (
        f"The engines differ by {found.measured:.2g} nat per token, {found.ratio:.3g} times what {found.dtype} "
        f"explains ({found.explained:.2g}, transformers on the same tokens)."
    )
    limit = f"check: at most {found.multiple:g} times what transformers' own rounding explains"
    return [
        act_finding(
            "unexplained_by_precision",
            "weights_or_configuration",
            symptom,
            Evidence("measured / explained", found.ratio, ">", found.multiple, source=limit),
            Evidence("standard errors above it", found.z, ">", found.limits["precision_z"]),
            explanation=(
                "Rounding of the same weights does less: a tensor, an adapter or a setting (rope base and scaling, "
                "eps, window, softcap, tied head) is not the same on both sides."
            ),
            fix="Find what differs, then repair it: no correction makes up for other weights.",
            refuted_by=(
                "Both engines have equal checksums of every tensor and the same configuration, and another engine at "
                "this dtype differs as much."
            ),
            snippets={"offdrift": "offdrift check ... --bisect   # names the first module that differs"},
        )
    ]


def without_precision(findings: Sequence[Finding], found: Explained, *dtypes: str) -> list[Finding]:
    """Findings but those that name precision where it can't be it: refuted, or float32 on both sides."""
    if found.exceeded or set(dtypes) == {"float32"}:
        return [f for f in findings if f.cause != PRECISION]
    return list(findings)
