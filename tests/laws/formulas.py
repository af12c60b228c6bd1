"""The push of every objective inside its published limits, token by token, from its formula.

`PUSH` maps an objective's type to a function of (objective, one sequence, the whole step). Formulas
and sections are those of the papers named in the docstrings of the objectives. A clip that acts
takes the push away; on random numbers nothing lies exactly on a bound.
"""

import math
from typing import Any

from offdrift.objectives import Clipped, ImportanceSampled, Reinforce
from offdrift.objectives.clipped import EntropyGrouped, GeometricClipped, QuantizedClipped, Soft
from offdrift.objectives.covariance import CovClipped, CovPenalized
from offdrift.objectives.ewma import ProximalEwma
from offdrift.objectives.flipped import Flipped
from offdrift.objectives.preference import Classified, Preference
from offdrift.objectives.prefix import PrefixClipped, PrefixMinClipped
from offdrift.objectives.prompt_dual import PromptDual
from offdrift.objectives.regression import Quadratic, Regression
from offdrift.objectives.reinforce import ProjectedSurrogate
from offdrift.objectives.second_moment import BalancedClipped, GroupClipped, SecondMomentClipped, VariancePenalized
from offdrift.objectives.turns import TurnNormalized
from tests.laws.definitions import Matrix, Sequence, diagonal, members, of_two, ratio, ratio_push, unit_ratio

Step = list[Sequence]


def outward(u: float, a: float, low: float, high: float) -> bool:
    """Whether a push leads further out of [low, high]: what every clip stops."""
    return (a > 0 and u > high) or (a < 0 and u < low)


def reinforce(o: Reinforce, s: Sequence, step: Step) -> Matrix:
    return diagonal([-a for a in s.a])


def importance_sampled(o: ImportanceSampled, s: Sequence, step: Step) -> Matrix:
    push = ratio_push(s, o.on, "token", "unit", lambda u, a, t: o.cap is not None and u > o.cap)
    if (c := o.saturation) is not None:  # d/du of u / (u + c)
        push = [[x * c / (ratio(s.l(o.on)[t]) + c) ** 2 for x in row] for t, row in enumerate(push)]
    return push


def clipped(o: Clipped, s: Sequence, step: Step) -> Matrix:
    def stopped(u: float, a: float, t: int) -> bool:
        stop = outward(u, a, 1 - o.eps_low, 1 + o.eps_high)
        if o.negatives == "both":
            stop = stop or (a < 0 and u > 1 + o.eps_high)
        return stop or (o.dual_clip is not None and a < 0 and u > o.dual_clip)

    return ratio_push(s, o.on, o.unit, o.gradient, stopped)


def prefix_clipped(o: PrefixClipped, s: Sequence, step: Step) -> Matrix:
    def stopped(u: float, a: float, t: int) -> bool:
        width = (t + 1) ** o.growth
        stop = outward(u, a, math.exp(-o.eps_low * width), math.exp(o.eps_high * width))
        dual = math.inf if o.dual_clip is None else math.exp(o.dual_clip * width)
        return stop or (a < 0 and u > dual) or u > math.exp(10)

    return ratio_push(s, o.on, "prefix", o.gradient, stopped)


def prefix_min_clipped(o: PrefixMinClipped, s: Sequence, step: Step) -> Matrix:
    r = [math.exp(x) for x in s.l(o.on)]
    stop = [outward(u, a, 1 - o.eps_low, 1 + o.eps_high) for u, a in zip(r, s.a)]
    least = [min(r[:t], default=1.0) for t in range(len(r))]
    return diagonal([0.0 if x else -a * m * u for x, a, m, u in zip(stop, s.a, least, r)])


def geometric_clipped(o: GeometricClipped, s: Sequence, step: Step) -> Matrix:
    l = s.l(o.on)  # noqa: E741
    stop = [outward(x, a, -o.eps_low, o.eps_high) for x, a in zip(l, s.a)]
    ends = [min(max(x, -o.eps_low), o.eps_high) if st else x for x, st in zip(l, stop)]
    g = math.exp(sum(x if a else 0.0 for x, a in zip(ends, s.a)) / len(s))
    moves = [0.0 if st or a == 0 else -s.mean_a * g / len(s) for st, a in zip(stop, s.a)]
    return [moves for _ in l]


def proximal_ewma(o: ProximalEwma, s: Sequence, step: Step) -> Matrix:
    r = [math.exp(x) for x in s.l("staleness")]
    w = [min(math.exp(x), o.limit) for x in s.l("full")]
    stop = [outward(x, a, 1 - o.eps, 1 + o.eps) for x, a in zip(r, s.a)]
    return diagonal([0.0 if st else -a * x for st, a, x in zip(stop, s.a, w)])


def flipped(o: Flipped, s: Sequence, step: Step) -> Matrix:
    assert o.eps_high_entropy is None

    def push(r: float, a: float) -> float:
        if a == 0:
            return 0.0
        factor = 1 / min(r, 1 + o.eps_high) if a > 0 else max(r, 1 - o.eps_low)
        if o.dual_clip is not None and factor > o.dual_clip:
            return -a * o.dual_clip
        return 0.0 if outward(r, a, 1 - o.eps_low, 1 + o.eps_high) else -a * factor

    return diagonal([push(math.exp(x), a) for x, a in zip(s.l(o.on), s.a)])


def soft(o: Soft, s: Sequence, step: Step) -> Matrix:
    found = []
    for x, a in zip(s.l(o.on), s.a):
        r, tau = math.exp(x), o.tau_positive if a > 0 else o.tau_negative
        sigmoid = 1 / (1 + math.exp(-tau * (r - 1)))
        found.append(-a * r * 4 * sigmoid * (1 - sigmoid))
    return diagonal(found)


def second_moment_clipped(o: SecondMomentClipped, s: Sequence, step: Step) -> Matrix:
    if o.scope == "all_drop_largest":
        kept = sorted(x * x for q in step for x in q.l(o.on))
        while len(kept) > 1 and sum(kept) / len(kept) >= o.budget:
            kept.pop()
        return ratio_push(s, o.on, "token", "unit", lambda u, a, t: math.log(u) ** 2 > kept[-1] * (1 + 1e-9))
    assert o.level == "discrete"
    harmful = [x * x for q in step for x in q.l(o.on) if q.mean_a * x > 0]
    low, high = 0.0, math.inf
    if sum(harmful) > o.budget * len(harmful):
        capped = lambda d: sum(min(x, d) for x in harmful)  # noqa: E731
        fits = [d for d in harmful if capped(d) < o.budget * len(harmful)]
        tau = math.sqrt(max(fits, default=0.0))
        low = 1 - max(1 - math.exp(-tau), o.floor_low)
        high = 1 + max(math.exp(tau) - 1, o.floor_high)
    return ratio_push(s, o.on, "token", "unit", lambda u, a, t: outward(u, a, low, high))


def variance_penalized(o: VariancePenalized, s: Sequence, step: Step) -> Matrix:
    return ratio_push(s, o.on, "token", "unit")


def balanced(o: BalancedClipped, s: Sequence, step: Step) -> Matrix:
    """The first low, then the first high, at which positives carry the share; the last of both otherwise."""
    pairs = [(math.exp(x), a) for q in step for x, a in zip(q.l(o.on), q.a)]

    def carried(low: float, high: float) -> bool:
        up = sum(a * min(r, high) for r, a in pairs if a >= 0)
        down = sum(-a * max(r, low) for r, a in pairs if a < 0)
        return up >= o.share / (1 - o.share) * down

    low, high = o.low, o.high
    while not carried(low, high) and low < o.low_max - 1e-9:
        low += o.increment
    while not carried(low, high) and high < o.high_max - 1e-9:
        high += o.increment

    def stopped(u: float, a: float, t: int) -> bool:
        return outward(u, a, low, high) or (o.dual_clip is not None and a < 0 and u > o.dual_clip)

    return ratio_push(s, o.on, "token", "unit", stopped)


def classified(o: Classified, s: Sequence, step: Step) -> Matrix:
    """+-n / tau times the softmax of each class with a logit 0 beside it; nothing where a class is empty."""
    siblings = [q for q in step if q.group == s.group]
    sides = {id(q): 1 if q.mean_a > 0 else -1 for q in siblings}
    logit = {id(q): -sides[id(q)] * sum(q.l(o.on)) / len(q) / o.tau for q in siblings}
    if len(set(sides.values())) == 1:
        return [[0.0] * len(s)] * len(s)
    same = [math.exp(logit[id(q)]) for q in siblings if sides[id(q)] == sides[id(s)]]
    push = -sides[id(s)] * len(siblings) / o.tau * math.exp(logit[id(s)]) / (1 + sum(same)) / len(s)
    return [[push] * len(s)] * len(s)


def group_clipped(o: GroupClipped, s: Sequence, step: Step) -> Matrix:
    r = [math.exp(x) for q in step if q.group == s.group for x in q.l(o.on)]
    mean = sum(r) / len(r)
    variance = sum((x - mean) ** 2 for x in r) / len(r)
    # A single token has variance 0 and the widest range.
    tightness = math.sqrt(o.reference / variance) if variance > 1e-30 else math.inf
    eps = o.eps * min(max(tightness, 0.5), 2.0)
    return ratio_push(s, o.on, "token", "unit", lambda u, a, t: outward(u, a, 1 - eps, 1 + eps))


def prompt_dual(o: PromptDual, s: Sequence, step: Step) -> Matrix:
    rewards = [q.reward for q in step if q.group == s.group]
    best = max(rewards)

    def slope(price: float) -> float:
        """Derivative of price * radius + price log mean e^(R / price); rises with the price."""
        tilt = [math.exp((x - best) / price) for x in rewards]
        mean = sum(t * x for t, x in zip(tilt, rewards)) / sum(tilt)
        return o.radius + math.log(sum(tilt) / len(tilt)) + (best - mean) / price

    low, high = math.log(o.floor), math.log(1e3)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(math.exp(middle)) > 0 else (middle, high)
    price = math.exp(high)
    return diagonal([-math.exp(x) * (a - price * x) for x, a in zip(s.l(o.on), s.a)])


def covariances(step: Step) -> list[list[float]]:
    n = sum(len(q) for q in step)
    mean_a, mean_x = sum(sum(q.a) for q in step) / n, sum(sum(q.pi) for q in step) / n
    return [[(a - mean_a) * (x - mean_x) for a, x in zip(q.a, q.pi)] for q in step]


def cov_penalized(o: CovPenalized, s: Sequence, step: Step) -> Matrix:
    assert o.penalty in ("abs", "exact")
    cov = covariances(step)
    ranked = sorted((x for q in cov for x in q), reverse=True)
    last = ranked[max(1, int(o.fraction * len(ranked))) - 1]
    slope = [x if o.penalty == "exact" else (x > 0) - (x < 0) for x in s.l(o.on)]
    chosen = [x if c >= last else 0 for x, c in zip(slope, cov[step.index(s)])]
    pushed = ratio_push(s, o.on, "token", "unit")
    return diagonal([pushed[t][t] + o.coef * chosen[t] for t in range(len(s))])


def cov_clipped(o: CovClipped, s: Sequence, step: Step) -> Matrix:
    """Plain PPO: which tokens are left out is chance, see `test_limits`."""
    inside = lambda u, a, t: outward(u, a, 1 - o.eps_low, 1 + o.eps_high)  # noqa: E731
    return ratio_push(s, o.on, "token", "unit", inside)


def quantized_clipped(o: QuantizedClipped, s: Sequence, step: Step) -> Matrix:
    rho = [math.exp(x) for x in s.l("mismatch")]
    taken = [min(x, o.cap) / x for x in rho]

    def stopped(u: float, a: float, t: int) -> bool:
        return outward(u, a, 1 - o.eps_low, (1 + o.eps_high) / taken[t])

    pushed = ratio_push(s, "staleness", "token", "unit", stopped)
    return diagonal([pushed[t][t] * rho[t] * taken[t] for t in range(len(s))])


def quadratic(o: Quadratic, s: Sequence, step: Step) -> Matrix:
    return diagonal([-a + o.beta * x for x, a in zip(s.l(o.on), s.a)])


def regression(o: Regression, s: Sequence, step: Step) -> Matrix:
    assert o.unit == "sequence"
    rewards = [q.reward for q in step if q.group == s.group]
    mean = sum(math.exp(x / o.beta_value) for x in rewards) / len(rewards)
    residual = o.beta * sum(s.l("full")) - (s.reward - o.beta_value * math.log(mean))
    return [[2 * o.beta * residual] * len(s)] * len(s)


def preference(o: Preference, s: Sequence, step: Step) -> Matrix:
    """-+ beta sigmoid(-beta (s_best - s_worst)) of the best and the worst of a prompt, times its answers; else 0."""
    siblings = [q for q in step if q.group == s.group]
    best, worst = max(siblings, key=lambda q: q.reward), min(siblings, key=lambda q: q.reward)
    sign = {id(best): -1, id(worst): 1}.get(id(s), 0) if best.reward > worst.reward else 0
    margin = sum(p - r for p, r in zip(best.pi, best.ref)) - sum(p - r for p, r in zip(worst.pi, worst.ref))
    push = sign * len(siblings) * o.beta / (1 + math.exp(o.beta * margin))
    return [[push] * len(s)] * len(s)


def turn_normalized(o: TurnNormalized, s: Sequence, step: Step) -> Matrix:
    inside = lambda u, a, t: outward(u, a, 1 - o.eps_low, 1 + o.eps_high)  # noqa: E731
    if o.mode == "renorm":
        return renormalized(o, s)
    bias = 0.0
    for q in step:
        for t in range(len(q)):
            u = math.exp(unit_ratio(q, q.l(o.on), t, o.unit)[0])
            turn = members(q, t, o.unit)
            a = sum(q.a[j] for j in turn) / len(turn)
            bias += (u * a / len(q)) ** 2 if inside(u, a, t) else 0.0
    size = max(1.0, math.sqrt(bias) / len(step))
    pushed = ratio_push(s, o.on, o.unit, "unit", inside)
    return [[x / size for x in row] for row in pushed]


def renormalized(o: TurnNormalized, s: Sequence) -> Matrix:
    assert o.unit == "token"
    r, low, high = [math.exp(x) for x in s.l(o.on)], 1 - o.eps_low, 1 + o.eps_high
    found = []
    for t, a in enumerate(s.a):
        turn = members(s, t, "turn")
        triggered = any(outward(r[j], s.a[j], low, high) for j in turn)
        mean = sum(min(max(r[j], low), high) for j in turn) / len(turn)
        u = r[t] / mean if triggered else r[t]
        found.append(0.0 if outward(u, a, low, high) else -a * u)
    return diagonal(found)


def entropy_grouped(o: EntropyGrouped, s: Sequence, step: Step) -> Matrix:
    n, l = len(s), s.l(o.on)  # noqa: E741
    ranked = sorted(range(n), key=lambda t: -s.entropy[t])
    top = set(ranked[: math.ceil(o.top_frac * n - 1e-9)])
    groups = [g for g in (top, set(range(n)) - top) if g]
    found = [0.0] * n
    for g in groups:
        u = math.exp(sum(l[t] for t in g) / len(g))
        eps = o.alpha / math.log(s.vocab) * sum(s.entropy[t] for t in g) / len(g)
        for t in g:
            factor = n / (len(groups) * len(g))
            found[t] = 0.0 if outward(u, s.a[t], 1 - eps, 1 + eps) else -s.a[t] * u * factor
    return diagonal(found)


def projected(o: ProjectedSurrogate, s: Sequence, step: Step) -> Matrix:
    """Of a vocabulary of two, the edge of the ball is one point on each side: there the ratio is constant."""
    inside = [of_two(math.exp(p), math.exp(q)) <= o.bound for q, p in zip(s.old, s.pi)]
    return diagonal([-a * math.exp(x) if i else 0.0 for a, x, i in zip(s.a, s.l("staleness"), inside)])


PUSH: dict[type, Any] = {
    ProjectedSurrogate: projected,
    Reinforce: reinforce,
    ImportanceSampled: importance_sampled,
    Clipped: clipped,
    PrefixClipped: prefix_clipped,
    PrefixMinClipped: prefix_min_clipped,
    GeometricClipped: geometric_clipped,
    ProximalEwma: proximal_ewma,
    Flipped: flipped,
    Soft: soft,
    SecondMomentClipped: second_moment_clipped,
    VariancePenalized: variance_penalized,
    BalancedClipped: balanced,
    Classified: classified,
    GroupClipped: group_clipped,
    PromptDual: prompt_dual,
    CovClipped: cov_clipped,
    CovPenalized: cov_penalized,
    QuantizedClipped: quantized_clipped,
    Quadratic: quadratic,
    Regression: regression,
    Preference: preference,
    TurnNormalized: turn_normalized,
    EntropyGrouped: entropy_grouped,
}


def pushes(objective: Any, step: Step) -> list[Matrix]:
    """The push of every sequence of a step."""
    known = type(objective) in PUSH
    assert known, f"write the push of {type(objective).__name__} into tests/laws/formulas.py"
    return [PUSH[type(objective)](objective, s, step) for s in step]


__all__ = ["PUSH", "outward", "pushes", "ratio"]
