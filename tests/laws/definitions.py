"""Ratios, units, weights and gradients from their definitions: plain numbers, loops over tokens.

Nothing here calls the library. A *push* is a matrix per sequence: `push[t][s]` is the derivative of
the loss of token t with respect to log pi of token s, before gates, weights and aggregate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offdrift.correction import FutureWeight, SignWeight, SurprisalWeight, VariationalWeight, Weight
from offdrift.laws.batches import VOCAB, Batch
from offdrift.methods import Method
from offdrift.methods.method import Interpolated
from offdrift.objectives.reinforce import ProjectedSurrogate
from offdrift.penalty import KLPenalty

Numbers = list[float]
Matrix = list[Numbers]


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """The tokens of one response, as numbers."""

    mu: Numbers
    old: Numbers
    pi: Numbers
    ref: Numbers
    a: Numbers
    entropy: Numbers
    lag: Numbers
    turn: list[int]
    """Number of each token's turn."""
    group: int
    reward: float
    vocab: int = VOCAB

    def __len__(self) -> int:
        return len(self.mu)

    def l(self, on: str) -> Numbers:  # noqa: E743
        """Log-ratio of each token."""
        second, first = {"full": (self.pi, self.mu), "mismatch": (self.old, self.mu), "staleness": (self.pi, self.old)}[
            on
        ]
        return [x - y for x, y in zip(second, first, strict=True)]

    @property
    def mean_a(self) -> float:
        return sum(self.a) / len(self)


def sequences_of(batch: Batch) -> list[Sequence]:
    names = ("mu", "old", "pi", "ref", "a", "entropy", "lag")
    columns = zip(*(batch.column(name) for name in names), strict=True)
    turns = [[i for i, n in enumerate(t) for _ in range(n)] for t in batch.turns]
    per_sequence = zip(turns, batch.groups.tolist(), batch.rewards.tolist(), strict=True)
    return [
        Sequence(**dict(zip(names, numbers, strict=True)), turn=turn, group=group, reward=reward)
        for numbers, (turn, group, reward) in zip(columns, per_sequence, strict=True)
    ]


def ratio(l: float) -> float:  # noqa: E741
    return math.exp(max(-20.0, min(20.0, l)))


# -- units ------------------------------------------------------------------------------------------


def members(s: Sequence, t: int, unit: str) -> list[int]:
    """The tokens whose ratios make up the ratio of token t."""
    if unit.startswith("turn"):
        return [j for j in range(len(s)) if s.turn[j] == s.turn[t]]
    return {
        "token": [t],
        "prefix": list(range(t + 1)),
        "sequence": list(range(len(s))),
        "geometric": list(range(len(s))),
    }[unit]


def unit_ratio(s: Sequence, l: Numbers, t: int, unit: str) -> tuple[float, Numbers]:  # noqa: E741
    """Log-ratio of the unit of token t, and its derivative with respect to each token's."""
    slope = [0.0] * len(l)
    if unit == "prefix_min":
        slope[t] = 1.0
        if t == 0:
            return l[0], slope
        least = min(range(t), key=l.__getitem__)
        slope[least] += 1.0
        return l[t] + l[least], slope
    inside = members(s, t, unit)
    if unit == "turn_arithmetic":
        total = sum(math.exp(l[j]) for j in inside)
        for j in inside:
            slope[j] = math.exp(l[j]) / total
        return math.log(total / len(inside)), slope
    share = 1 / len(inside) if unit in ("geometric", "turn") else 1.0
    for j in inside:
        slope[j] = share
    return share * sum(l[j] for j in inside), slope


def one_hot(n: int, t: int, value: float = 1.0) -> Numbers:
    return [value if j == t else 0.0 for j in range(n)]


def diagonal(values: Numbers) -> Matrix:
    return [one_hot(len(values), t, x) for t, x in enumerate(values)]


def ratio_push(
    s: Sequence, on: str, unit: str, through: str, stopped: Callable[[float, float, int], bool] = lambda u, a, t: False
) -> Matrix:
    """Push of L_t = -a u with u the ratio of the token's unit; none where `stopped(u, a, t)`.

    `through` "unit": the gradient takes every log-prob in u, and a is the mean over the unit;
    "token": the gradient takes the token's own log-prob alone, and its own advantage.
    """
    found, l = [], s.l(on)  # noqa: E741
    for t in range(len(s)):
        log_u, slope = unit_ratio(s, l, t, unit)
        a = s.a[t]
        if through == "token":
            slope = one_hot(len(s), t)
        elif unit not in ("token", "prefix", "prefix_min"):
            inside = members(s, t, unit)
            a = sum(s.a[j] for j in inside) / len(inside)
        u = ratio(log_u)
        flat = abs(log_u) > 20 or stopped(u, a, t)
        found.append([0.0 if flat else -a * u * x for x in slope])
    return found


# -- weights ----------------------------------------------------------------------------------------


def limited(w: Weight, raw: float, position: int) -> float:
    """A weight inside its limits; `position` counts from 1."""
    step = position**w.growth
    low = 0.0 if w.floor is None else w.floor**step
    high = math.inf if w.cap is None else w.cap**step
    outside = not low <= raw <= high
    kept = 0.0 if outside and w.outside == "mask" else min(max(raw, low), high)
    kept = kept if w.saturation is None else kept / (kept + w.saturation)
    return kept if w.gaussian is None else kept * math.exp(-(math.log(raw) ** 2) / (2 * w.gaussian**2))


def weights_of(w: Any, step: list[Sequence]) -> Matrix:
    """The weight of every token of a step."""
    if isinstance(w, VariationalWeight):
        return [[kernel(w, s, a) for a in s.a] for s in step]
    if isinstance(w, FutureWeight):
        return [[future(w, s, t) for t in range(len(s))] for s in step]
    if isinstance(w, SurprisalWeight):
        return [[1 / max(-sum(s.pi) / len(s), w.floor)] * len(s) for s in step]
    if isinstance(w, SignWeight):
        return [[w.negative if a < 0 else w.positive for a in s.a] for s in step]
    assert isinstance(w, Weight), f"define {type(w).__name__} in tests/laws/definitions.py"
    raw = [[limited(w, ratio(unit_ratio(s, s.l(w.on), t, w.unit)[0]), t + 1) for t in range(len(s))] for s in step]
    if w.normalize:
        whole = w.unit in ("sequence", "geometric")
        counted = [x[0] for x in raw if x] if whole else [y for x in raw for y in x]
        mean = sum(counted) / len(counted)
        raw = [[y / mean for y in x] for x in raw]
    return [[x if applies(w, a, s.reward) else 1.0 for x, a in zip(r, s.a)] for r, s in zip(raw, step)]


def future(w: FutureWeight, s: Sequence, t: int) -> float:
    """exp(sum over the tokens from t on of 2^(-distance / half_life) log r), inside its limits."""
    l = s.l(w.of)  # noqa: E741
    counted = [x if w.drop_above is None or math.exp(x) <= w.drop_above else 0.0 for x in l]
    raw = math.exp(sum(2 ** (-(j - t) / w.half_life) * counted[j] for j in range(t, len(l))))
    inside = min(max(raw, w.floor), w.cap)
    harmful = w.harmful_above is not None and s.a[t] < 0 and math.exp(l[t]) > w.harmful_above
    return min(max(inside, 0.8), 1.0) if harmful else inside


def applies(w: Weight, a: float, reward: float) -> bool:
    """Whether a weight is about tokens of this advantage in a sequence of this reward."""
    sign = {"any": True, "positive": a > 0, "negative": a < 0}[w.advantage]
    line = w.correct_above
    return sign and {"any": True, "correct": reward > line, "incorrect": reward <= line}[w.outcome]


def kernel(w: VariationalWeight, s: Sequence, a: float) -> float:
    """exp(lam + k l - lam e^l) of the staleness and of the truncated mismatch of a sequence."""
    assert w.anchor == "old"
    floor = math.log(1e-8)
    mismatch = sum(min(max(x, floor), math.log(w.cap)) for x in s.l("mismatch"))
    total = sum(max(-20.0, min(20.0, x)) for x in s.l("staleness")) + mismatch
    total = max(floor, min(20.0, total))
    k, lam = (w.k_positive, w.lam_positive) if a >= 0 else (w.k_negative, w.lam_negative)
    return math.exp(lam + k * total - lam * math.exp(total))


# -- what every row adds to its objective -------------------------------------------------------------


def anchored(row: Method, step: list[Sequence]) -> list[Sequence]:
    """The old policy as the row's anchor defines it: log mu + (1 - 1/d)(log pi - log mu)."""
    if row.anchor is None:
        return step
    assert type(row.anchor) is Interpolated
    assert row.anchor.at_zero_lag == "current"
    found = []
    for s in step:
        alpha = [1 - 1 / d if d > 0 else 1.0 for d in s.lag]
        old = [m + max(x, 0.0) * (p - m) for x, m, p in zip(alpha, s.mu, s.pi)]
        found.append(replace(s, old=old))
    return found


def penalty_push(penalty: KLPenalty | None, s: Sequence) -> Numbers:
    """coef d/dlog pi of q (e^-d + d - 1), with q = pi / mu and d = log pi - log ref."""
    if penalty is None:
        return [0.0] * len(s)
    known = KLPenalty(estimator="k3_corrected", coef=penalty.coef)
    assert penalty == known, f"write down the gradient of {penalty.formula}"
    found = []
    for l, p, r in zip(s.l("full"), s.pi, s.ref):  # noqa: E741
        d = p - r
        k3 = math.exp(-d) + d - 1
        found.append(float(penalty.coef) * math.exp(l) * (k3 + 1 - math.exp(-d)))
    return found


def own_pull(objective: Any, s: Sequence) -> Numbers:
    """Gradient of the terms of an objective that neither gates nor weights touch."""
    if getattr(objective, "pull", 0.0):  # pull (log w)^2
        return [2 * objective.pull * x for x in s.l(objective.on)]
    if hasattr(objective, "penalty") and hasattr(objective, "target"):  # penalty (r - 1)^2
        r = [math.exp(x) for x in s.l(objective.on)]
        return [2 * objective.penalty * (x - 1) * x for x in r]
    if isinstance(objective, ProjectedSurrogate):
        return [objective.coef * pull_to_ball(math.exp(q), math.exp(p), objective.bound) for q, p in zip(s.old, s.pi)]
    return [0.0] * len(s)


def of_two(p: float, q: float) -> float:
    """KL between two laws of a token and the rest."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def edge_of_ball(q: float, p: float, bound: float) -> float:
    """The probability next to p at which KL(. || q) is the bound; p itself inside the ball. By halving."""
    if of_two(p, q) <= bound:
        return p
    near, far = q, p
    for _ in range(200):
        middle = (near + far) / 2
        near, far = (middle, far) if of_two(middle, q) < bound else (near, middle)
    return near


def pull_to_ball(q: float, p: float, bound: float) -> float:
    """Slope of KL(p || edge) against log p, with the edge held."""
    edge = edge_of_ball(q, p, bound)
    return p * (math.log(p / edge) - math.log((1 - p) / (1 - edge)))


def share(row: Method, s: Sequence) -> float:
    """What the aggregate multiplies each token's loss by, before the normalizer."""
    return 1 / len(s) if row.aggregate == "seq_mean_token_mean" else 1.0


def untouched(row: Method, step: list[Sequence]) -> Tensor:
    """The part of the gradient that gates and weights leave alone."""
    found = []
    for s in step:
        both = zip(own_pull(row.objective, s), penalty_push(row.penalty, s))
        found += [share(row, s) * (x + y) for x, y in both]
    return torch.tensor(found, dtype=torch.float64)


def gradient(
    row: Method, step: list[Sequence], push: Callable[[Any, list[Sequence]], list[Matrix]], keep: Tensor
) -> Tensor:
    """Gradient of the summed loss from the objective's pushes, weights, gates and aggregate."""
    step = anchored(row, step)
    weights = [[1.0] * len(s) for s in step]
    for w in row.correction.weights:
        found = weights_of(w, step)
        weights = [[x * y for x, y in zip(*both)] for both in zip(weights, found, strict=True)]
    pushed, kept, total = push(row.objective, step), iter(keep.tolist()), []
    for s, matrix, weight in zip(step, pushed, weights, strict=True):
        scale = [share(row, s) * w if next(kept) else 0.0 for w in weight]
        total += [sum(scale[t] * matrix[t][j] for t in range(len(s))) for j in range(len(s))]
    assert next(kept, None) is None
    return torch.tensor(total, dtype=torch.float64) + untouched(row, step)
