"""Thresholds from measured mismatch: the gate limits that accept a given share of clean data.

Published thresholds fit their authors' engines. Between two engines with the same weights, everything that a
gate rejects is a false positive; the threshold that accepts 99 % of such data shows where real drift begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import BatchInfo
from offdrift.certificate.confidence import clopper_pearson
from offdrift.correction.statistics import statistic
from offdrift.divergence.evidence import Divergence
from offdrift.errors import BadValueError, EvidenceError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, override
from offdrift.ratios import stopped_log_ratio

GATES = ("trm_max", "trm_max_tv", "trm_avg", "trm_max_k2", "trm_avg_k3", "decoupled_k3_rs", "bypass_ppo_clip_k3_rs")
"""Methods of one gate with an upper bound."""

BANDS = {"decoupled_geo_rs": "gate", "bypass_pg_geo_rs": "gate", "icepop": "weight", "bypass_pg_token_icepop": "weight"}
"""Methods with a band of ratios, and the part that has it."""

CAPS = ("decoupled_token_is", "token_tis")
"""Methods that truncate a token's weight."""

DIGITS = 3
"""Significant digits of a threshold, which is rounded outwards."""


@dataclass(frozen=True)
class Calibrated:
    """One setting of one method, and the share of data it accepts.

    A band is two of these: apply both. `acceptance` is a share of sequences for sequence gates, and a
    share of tokens for token bands and caps.
    """

    method: str
    setting: str
    """Path for `override`, such as "gate.high"."""
    value: float
    acceptance: float
    """Share of the measured data that the method accepts with it: unmasked, and not truncated."""
    low: float
    """Lower end of the share of fresh data that it accepts, without assuming any distribution."""
    high: float


def calibrated(
    logprobs: LogProbs, divergences: Mapping[str, Divergence], *, acceptance: float = 0.99, confidence: float = 0.95
) -> list[Calibrated]:
    """The tightest settings that accept a given share of the data, for the main methods.

    The value is an order statistic of the data, so the share of fresh data below it has a
    Beta(k, n + 1 - k) distribution whatever the data's own is; [low, high] is its Clopper-Pearson
    interval. Independent draws are prompts, not their sequences or tokens (the cautious count).

    Args:
        logprobs: of two engines with the same weights; the policies in it decide which methods are calibrated.
        divergences: of the same tokens, for gates on whole distributions.
        acceptance: share to be accepted, in (0, 1].
        confidence: of [low, high].

    Returns: settings of every method whose evidence is there: gates, then bands, then caps.

    Raises: `BadValueError` if acceptance or confidence lies outside its interval.

    Example:
        >>> import torch
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -1.0]), torch.tensor([-1.1, -1.0]),
        ...                    segments=Segments.from_lengths([1, 1]))
        >>> [(c.method, c.value) for c in calibrated(lp, {}) if c.method == "trm_max_k2"]
        [('trm_max_k2', 0.00501)]

    Reference: order statistics: S. Wilks, Annals of Mathematical Statistics 12 (1941), 91-96.
    """
    if not (0 < acceptance <= 1 and 0 < confidence < 1):
        raise BadValueError(f"acceptance = {acceptance} must lie in (0, 1], confidence = {confidence} in (0, 1)")
    data = _Data(logprobs, BatchInfo(divergences=divergences), acceptance, 1 - confidence)
    jobs: list[tuple[Callable[[str], list[Calibrated]], str]] = [
        *((data.gate, name) for name in GATES),
        *((data.band, name) for name in BANDS),
        *((data.cap, name) for name in CAPS),
    ]
    table = []
    for calibrate, name in jobs:
        with suppress(EvidenceError):  # the log-probs or divergences lack what this method reads
            table += calibrate(name)
    return table


def settings(table: list[Calibrated], name: str) -> dict[str, float]:
    """The calibrated settings of one method, for `override`."""
    return {c.setting: c.value for c in table if c.method == name}


@dataclass(frozen=True)
class _Data:
    """The data, the share of it to accept, and the error probability of the intervals."""

    logprobs: LogProbs
    batch_info: BatchInfo
    share: float
    alpha: float

    def gate(self, name: str) -> list[Calibrated]:
        """An upper bound on a sequence's largest or mean statistic."""
        gate: Any = METHODS[name].correction.gates[0]
        segments = self.logprobs.segments
        x = statistic(gate.statistic, self.logprobs, self.batch_info, on=gate.on)
        x = segments.max(x) if gate.unit == "seq_max" else segments.mean(x)
        high = self._quantile(x[segments.lengths > 0])
        return self._table(name, {"gate.high": rounded_up(high)})

    def band(self, name: str) -> list[Calibrated]:
        """A band [1/u, u] of ratios, u from the quantile of the absolute log-ratio."""
        kind = BANDS[name]
        correction: Any = METHODS[name].correction
        part = correction.gates[0] if kind == "gate" else correction.weights[0]
        log_ratio = stopped_log_ratio(self.logprobs, on=part.on)
        if kind == "gate":
            segments = self.logprobs.segments
            log_ratio = segments.mean(log_ratio)[segments.lengths > 0]
        u = _ratio_above(self._quantile(log_ratio.abs()))
        ends = ("gate.low", "gate.high") if kind == "gate" else ("weight.floor", "weight.cap")
        return self._table(name, {ends[0]: 1 / u, ends[1]: u})

    def cap(self, name: str) -> list[Calibrated]:
        """A cap on token weights, at least 1."""
        weight: Any = METHODS[name].correction.weights[0]
        log_ratio = stopped_log_ratio(self.logprobs, on=weight.on)
        return self._table(name, {"weight.cap": _ratio_above(max(0.0, self._quantile(log_ratio)))})

    def _quantile(self, x: Float[Tensor, " k"]) -> float:
        """The smallest number of `x` that the share of them does not exceed."""
        rank = math.ceil(self.share * len(x) - 1e-9)
        return float(x.kthvalue(max(rank, 1)).values)

    def _table(self, name: str, values: dict[str, float]) -> list[Calibrated]:
        """The settings with the acceptance that the method itself, so set, has on the data."""
        method = override(METHODS[name], values)
        decided = method.correction(self.logprobs, None, self.batch_info)
        accepted = decided.keep & ~decided.limited
        segments = self.logprobs.segments
        if method.correction.gates:  # which decide about whole sequences
            accepted = segments.sum(accepted.double())[segments.lengths > 0] > 0
        acceptance = float(accepted.double().mean())
        ids = segments.group_ids
        draws = int((segments.lengths > 0).sum()) if ids is None else len(ids.unique())
        # Rounded down: a share that no whole number of draws has must not look better than it is.
        events = math.floor(min(acceptance, 1.0) * draws + 1e-9)
        ends = clopper_pearson(events, draws, alpha=self.alpha)
        return [Calibrated(name, k, v, acceptance, ends.low, ends.high) for k, v in values.items()]


def _ratio_above(log_ratio: float) -> float:
    """A ratio above e^log_ratio, with few digits after 1."""
    # A float32 log-ratio must stay inside when it is compared with the log of this ratio.
    excess = math.expm1(log_ratio + 1e-6 * max(1.0, log_ratio))
    return 1 + rounded_up(excess)


def rounded_up(x: float) -> float:
    """The next larger number with `DIGITS` significant digits; 0 stays 0.

    Example:
        >>> rounded_up(0.012341), rounded_up(7.0)
        (0.0124, 7.0)
    """
    if x == 0 or not math.isfinite(x):
        return x
    scale = 10.0 ** (DIGITS - 1 - math.floor(math.log10(abs(x))))
    up = math.ceil(x * scale) / scale
    return up if up >= x else math.nextafter(x, math.inf)
