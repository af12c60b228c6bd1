"""Length bias of gates: the share of sequences that each accepts, against their length.

A gate on the worst token has one more chance to reject with every token; a gate on a mean has not. Table 2 of the TRM
paper states how each scales when violations are independent. Here the real gates run on drawn (independent) and
recorded streams of drift, with thresholds as published, and set so that all accept the same share at one length.

Reference: Li et al., arXiv:2512.23075v5, Appendix F, eq. 97 and Table 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import BatchInfo
from offdrift.correction.gate import Gate, LengthNeutralGate
from offdrift.divergence.evidence import Divergence
from offdrift.errors import BadValueError, RecordError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift.texts import read_arrays, read_bytes
from offdrift_lab.exact.policy import token_kl

AnyGate = Gate | LengthNeutralGate

BISECTIONS = 60
CALM, SPIKE = 0.02, 1.5
"""Drift of a token's logits, standard deviation, nats: everywhere, and at a violation."""
VOCAB, CONTEXTS = 64, 4096


def _kl(unit: str, high: float) -> Gate:
    return Gate(statistic="kl", on="full", unit=unit, high=high)  # type: ignore[arg-type]


GATES: dict[str, tuple[Callable[[float], AnyGate], float, str]] = {
    "trm_max": (lambda u: _kl("seq_max", u), 0.05, "1 - (1-p)^T"),
    "trm_avg": (lambda u: _kl("seq_mean", u), 0.001, "constant"),
    "ln_trm": (lambda u: LengthNeutralGate(high=u), 0.05, "constant"),
    "ser": (lambda u: Gate(statistic="ratio_error", on="full", unit="seq_mean", high=u), 0.10, "constant"),
    "seq_product": (
        lambda u: Gate(statistic="ratio", on="full", unit="seq_sum", low=1 / (1 + u), high=1 + u),
        2.0,
        "not in Table 2",
    ),
}
"""Gate for a threshold, the published threshold, and the rejection that Table 2 states. The product
of ratios must lie in [1/(1+u), 1+u]."""


@dataclass(frozen=True)
class Stream:
    """Drift of `b` sequences of `t` tokens: per token, current against rollout."""

    name: str
    log_ratio: Float[Tensor, "b t"]
    """log pi - log mu of the drawn token."""
    kl: Float[Tensor, "b t"]
    """KL(mu || pi) over the vocabulary, nats."""

    def prefix(self, length: int) -> tuple[LogProbs, BatchInfo]:
        """The first `length` tokens of every sequence, as a batch."""
        sequences = len(self.kl)
        log_ratio = self.log_ratio[:, :length].reshape(-1)
        # Only the log-ratio is read; any pair of legal log-probs with that difference will do.
        low = -log_ratio.clamp(min=0)
        batch = LogProbs.pack(low, low + log_ratio, segments=Segments.from_lengths([length] * sequences))
        kl = Divergence.exact("kl_rollout_current", self.kl[:, :length].reshape(-1))
        return batch, BatchInfo(divergences={kl.name: kl})

    def accepted(self, gate: AnyGate, length: int) -> Bool[Tensor, " b"]:
        """Mark the sequences that the gate keeps, cut to `length` tokens."""
        batch, batch_info = self.prefix(length)
        return gate.keep(batch, None, batch_info).reshape(-1, length)[:, 0]


@dataclass(frozen=True)
class Curve:
    """Acceptance of a gate by length."""

    gate: str
    threshold: float
    stated: str
    """The rejection that Table 2 states for independent violations."""
    lengths: tuple[int, ...]
    acceptance: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    """Wilson interval of each acceptance, 95 %."""
    exponent: float | None
    """gamma in acceptance = exp(-c T^gamma): 1 is exponential, 0 constant; None if nothing varies."""
    rate: float | None
    """c of the same fit."""


def independent_stream(*, sequences: int, horizon: int, violation: float, seed: int = 0) -> Stream:
    """Tokens drawn independently: calm contexts, and with probability `violation` a spike.

    Each context is a pair of distributions over 64 tokens, a random one and the same with noise on
    its logits; log-ratio and KL of a token come from the same pair.

    Args:
        sequences, horizon: how many, and tokens of each.
        violation: probability p that a token's KL is that of a spike (0.05 nats or more), in [0, 1].

    Raises: `BadValueError` naming the argument.

    Example:
        >>> s = independent_stream(sequences=4, horizon=16, violation=0.1)
        >>> s.kl.shape, bool((s.kl >= 0).all())
        (torch.Size([4, 16]), True)
    """
    if min(sequences, horizon) < 1 or not 0 <= violation <= 1:
        raise BadValueError(
            f"sequences = {sequences}, horizon = {horizon}, violation = {violation}; give at least "
            "one sequence of one token, and a probability"
        )
    g = torch.Generator().manual_seed(seed)
    calm, spikes = _contexts(CALM, g), _contexts(SPIKE, g)
    shape = (sequences, horizon)
    spiked = torch.rand(shape, generator=g) < violation
    (calm_ratio, calm_kl), (spike_ratio, spike_kl) = (_draw(pair, shape, g) for pair in (calm, spikes))
    log_ratio, kl = spike_ratio.where(spiked, calm_ratio), spike_kl.where(spiked, calm_kl)
    return Stream(f"independent, p = {violation:g}", log_ratio, kl)


def curves(
    stream: Stream,
    *,
    lengths: Sequence[int],
    same_at: int | None = None,
    share: float = 0.9,
) -> list[Curve]:
    """Acceptance of every gate at every length.

    Args:
        lengths: where to measure, tokens; at most the stream's length.
        same_at: the length at which every gate's threshold is set to accept `share`; None keeps the
            published thresholds.
        share: acceptance there, in (0, 1).

    Raises: `ShapeError` if the stream is shorter than a length.

    Example:
        >>> s = independent_stream(sequences=2000, horizon=400, violation=1e-3)
        >>> worst, mean = curves(s, lengths=[100, 400], same_at=100)[:2]
        >>> worst.acceptance[1] < 0.75 < mean.acceptance[1]
        True
    """
    asked = [*lengths, *([same_at] if same_at else [])]
    if not lengths or min(asked) < 1 or max(asked) > stream.kl.shape[1]:
        raise ShapeError(
            f"lengths = {list(lengths)}, same_at = {same_at}: the stream's sequences have "
            f"{stream.kl.shape[1]} tokens; ask for lengths from 1 to that"
        )
    measured, sequences = [], len(stream.kl)
    for name, (make, published, stated) in GATES.items():
        limit = published if same_at is None else _threshold(stream, make, same_at, share)
        counts = [int(stream.accepted(make(limit), n).sum()) for n in lengths]
        acceptance = tuple(k / sequences for k in counts)
        low, high = zip(*(wilson(k, sequences) for k in counts))
        gamma, c = scaling(lengths, acceptance, sequences) or (None, None)
        measured.append(
            Curve(
                name,
                limit,
                stated,
                lengths=tuple(lengths),
                acceptance=acceptance,
                low=low,
                high=high,
                exponent=gamma,
                rate=c,
            )
        )
    return measured


def scaling(lengths: Sequence[int], acceptance: Sequence[float], sequences: int) -> tuple[float, float] | None:
    """(gamma, c) of acceptance = exp(-c T^gamma), least squares weighted by what each point knows.

    In log(-log a) = log c + gamma log T a point with `a` accepted out of `sequences` has variance
    (1 - a) / (sequences a log(a)^2); lengths at which all or none pass say nothing and are left out.

    Example:
        >>> gamma, c = scaling([10, 100, 1000], [math.exp(-0.001 * n) for n in (10, 100, 1000)], 1000)
        >>> round(gamma, 6), round(c, 6)
        (1.0, 0.001)
    """
    points = [(n, a) for n, a in zip(lengths, acceptance, strict=True) if 0 < a < 1]
    if len({n for n, _ in points}) < 2:
        return None
    x = torch.tensor([math.log(n) for n, _ in points], dtype=torch.float64)
    a = torch.tensor([a for _, a in points], dtype=torch.float64)
    y, weight = (-a.log()).log(), sequences * a * a.log().square() / (1 - a)
    mean_x, mean_y = (weight @ x) / weight.sum(), (weight @ y) / weight.sum()
    gamma = (weight @ ((x - mean_x) * (y - mean_y))) / (weight @ (x - mean_x).square())
    return float(gamma), float((mean_y - gamma * mean_x).exp())


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion.

    Example:
        >>> low, high = wilson(9, 10)
        >>> round(low, 3), round(high, 3)
        (0.596, 0.982)
    """
    p, zz = successes / trials, z * z
    middle = (p + zz / (2 * trials)) / (1 + zz / trials)
    half = z / (1 + zz / trials) * math.sqrt(p * (1 - p) / trials + zz / (4 * trials * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def _contexts(noise: float, g: torch.Generator) -> tuple[Float[Tensor, "c v"], Float[Tensor, "c v"]]:
    """Random distributions, and the same with noise on their logits."""
    logits = 2 * torch.randn(CONTEXTS, VOCAB, generator=g, dtype=torch.float64)
    drifted = logits + noise * torch.randn(CONTEXTS, VOCAB, generator=g, dtype=torch.float64)
    return logits.softmax(-1), drifted.softmax(-1)


def _draw(
    pair: tuple[Float[Tensor, "c v"], Float[Tensor, "c v"]], shape: tuple[int, int], g: torch.Generator
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """A token of a random context at every place: its log-ratio and its context's KL."""
    mu, pi = pair
    which = torch.randint(len(mu), shape, generator=g)
    u = torch.rand(shape, generator=g, dtype=torch.float64)
    # Inverse transform, with the contexts' cumulative sums laid end to end: one search for all.
    ends = (mu.cumsum(-1).clamp(max=1.0) + torch.arange(len(mu)).unsqueeze(1)).reshape(-1)
    flat = torch.searchsorted(ends, (which + u * (1 - 1e-12)).reshape(-1), right=True)
    flat = torch.minimum(flat, which.reshape(-1) * VOCAB + VOCAB - 1)
    log_ratio = (pi.log() - mu.log()).reshape(-1)[flat].reshape(shape)
    return log_ratio.float(), token_kl(mu, pi)[which].float()


def _threshold(stream: Stream, make: Callable[[float], AnyGate], length: int, share: float) -> float:
    """The smallest threshold, to rounding, whose gate accepts at least `share` at this length."""

    def enough(threshold: float) -> bool:
        return float(stream.accepted(make(threshold), length).double().mean()) >= share

    low, high = 0.0, 1.0
    while not enough(high) and high < 1e12:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# Recorded drift of a real training engine from a real rollout engine, per token: a compressed numpy
# archive of `log_ratio` and `kl`, `[sequences, tokens]`, and a `name`. No tokens, no text, no pickles.

FOLDER = Path(__file__).with_name("recordings")


def packaged() -> list[Path]:
    """The recordings that come with the library (`benchmarks/record_drift.py` made them)."""
    return sorted(FOLDER.glob("*.npz"))


def write_recording(stream: Stream, path: Path) -> None:
    """Store a stream."""
    arrays = {"log_ratio": stream.log_ratio.numpy(), "kl": stream.kl.numpy()}
    np.savez_compressed(path, name=np.array(stream.name), **arrays)  # type: ignore[arg-type]


def read_recording(path: Path) -> Stream:
    """Read a stream back.

    Raises: `RecordError` naming the file if it is missing, corrupt, or not a recording.
    """
    try:
        file = read_arrays(read_bytes(path))
        name, log_ratio, kl = str(file["name"]), file["log_ratio"], file["kl"]
    except (OSError, ValueError, KeyError) as error:
        raise RecordError(
            f"{path} is not a recording of drift: {error}; make one with benchmarks/record_drift.py"
        ) from error
    good = log_ratio.ndim == 2 and log_ratio.shape == kl.shape and kl.size > 0
    good = good and log_ratio.dtype.kind == kl.dtype.kind == "f"
    if not good or not np.isfinite(log_ratio).all() or not (kl >= 0).all():
        raise RecordError(
            f"{path}: log_ratio {log_ratio.shape} and kl {kl.shape} must be finite, [sequences, "
            "tokens] alike, and no KL negative"
        )
    return Stream(name, torch.from_numpy(log_ratio).float(), torch.from_numpy(kl).float())
