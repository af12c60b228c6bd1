"""A drift that several settings make together, split over them: a two-level factorial on the same tokens.

Every subset S of k settings is changed, 2^k runs, and the tokens that the unchanged engine drew have a mean
divergence y(S) in each. With the dividends of a set function,

    d(S) = sum over R in S of (-1)^(|S| - |R|) y(R)          d({i}): main effect;  |S| > 1: interaction
    y(all) - y(none) = sum over S of d(S)

the share of setting i, sum over S with i of d(S) / |S| (its Shapley value), adds up to the whole change. Rounding
errors add up, so that divergences, their squares, interact: an interaction is no defect.

Reference: J. Harsanyi, International Economic Review 4 (1963), 194-220, for dividends; L. Shapley, Contributions to the
Theory of Games II (1953), 307-317, for shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from jaxtyping import Float
from torch import Tensor

from offdrift.check.bench import Bench, EngineSpec, Pair
from offdrift.check.factors.base import Factor, Setting, measured_by, teacher_forced
from offdrift.check.measure import Measured, clustered_error
from offdrift.errors import BadValueError, NotOfferedError
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments

MOST = 4
"""Settings of one factorial: 16 measurements, and as many engines as subsets of those of the rollout engine."""

Subset = frozenset[str]


def compound(bench: Bench, pair: Pair, baseline: Measured, factors: Sequence[Factor]) -> dict[str, Any]:
    """The `compound` entry of `check.json`: effects of several settings, alone and together, and each one's share.

    Args:
        baseline: the pair without any change.
        factors: of `combined`, which change an engine's specification.

    Returns: `factors` with what each `changed`; `tokens`; `exact`: KL(mu || pi) over the whole vocabulary, else
        (log pi - log mu)^2 / 2; `before` and `after`, mean divergences with nothing and with everything changed;
        `effects` and `shares`, each a `change` in nat per token with its 95 % interval, clustered by sequence.

    Raises: `NotOfferedError` for an engine that cannot score tokens that it did not sample; `EngineError` for one that
        does not start.
    """
    setting = Setting(bench, pair.rollout, pair.train, baseline)
    words = {f.name: _changed(f, pair, bench)[0] for f in factors}
    runs: dict[Subset, Float[Tensor, " n"]] = {}
    specs = {chosen: _specs(pair, bench, factors, chosen) for chosen in subsets(words)}
    exact = True
    sample = setting.drawn
    for rollout in dict.fromkeys(str(spec) for spec, _ in specs.values()):  # each engine is started once
        members = {chosen: both for chosen, both in specs.items() if str(both[0]) == rollout}
        spec = next(iter(members.values()))[0]
        forced = sample if spec == pair.rollout else teacher_forced(setting, spec, sample)
        for chosen, (_, train) in members.items():
            runs[chosen], is_exact = _divergence(measured_by(setting, forced, train=train))
            exact &= is_exact
    return {"factors": [*words], "changed": words, "tokens": len(sample.tokens), "exact": exact} | attributed(
        runs, sample
    )


def combined(factors: Iterable[Factor]) -> list[Factor]:
    """Check settings that are to be changed together.

    Raises: `BadValueError` for one that is not a setting of an engine's specification, or other than 2 to `MOST`.
    """
    chosen = list(factors)
    if not 2 <= len(chosen) <= MOST:
        raise BadValueError(f"compound takes 2 to {MOST} factors, not {len(chosen)}: it runs every subset of them")
    for factor in chosen:
        if factor.change is None:
            raise BadValueError(f"compound: {factor.name} is not a setting that can be changed beside others")
    return chosen


def attributed(runs: Mapping[Subset, Float[Tensor, " n"]], drawn: Rollouts) -> dict[str, Any]:
    """Effects and shares of settings from the divergence of every token in every subset.

    Args:
        runs: divergence of each token, nat, by the settings that were changed; the empty set is in it, and every other.
    """
    segments = Segments(drawn.cu_seqlens)
    everything = max(runs, key=len)
    dividends = {s: sum((-1) ** (len(s) - len(r)) * runs[r] for r in runs if r <= s) for s in runs if s}
    shares = {name: sum(d / len(s) for s, d in dividends.items() if name in s) for name in sorted(everything)}

    def row(x: Any) -> dict[str, float]:
        mean, reach = float(x.mean()), 1.96 * clustered_error(x, segments)
        return {"change": mean, "low": mean - reach, "high": mean + reach}

    nothing = runs[frozenset()]
    return {
        "before": float(nothing.mean()),
        "after": float(runs[everything].mean()),
        "total": row(runs[everything] - nothing),
        "effects": [{"factors": sorted(s), **row(dividends[s])} for s in subsets(sorted(everything)) if s],
        "shares": [{"factor": name, **row(x)} for name, x in shares.items()],
    }


def subsets(names: Iterable[str]) -> list[Subset]:
    """Every subset of some names, the smallest first.

    Example:
        >>> [sorted(s) for s in subsets(["a", "b"])]
        [[], ['a'], ['b'], ['a', 'b']]
    """
    names = [*names]
    return [frozenset(s) for size in range(len(names) + 1) for s in combinations(names, size)]


def _divergence(measured: Measured) -> tuple[Float[Tensor, " n"], bool]:
    """Divergence of every token, and if it is the exact KL."""
    log = measured.logged
    assert log is not None
    assert log.logp_old is not None
    if "kl_rollout_old" in log.divergences:
        return log.divergences["kl_rollout_old"].double(), True
    assert log.logp_rollout is not None
    return (log.logp_old.double() - log.logp_rollout.double()).square() / 2, False


def _changed(factor: Factor, pair: Pair, bench: Bench) -> tuple[str, EngineSpec]:
    """Describe a factor's change, and make its engine afterwards."""
    assert factor.change is not None
    return factor.change(pair.train if factor.side == "train" else pair.rollout, bench.model)


def _specs(pair: Pair, bench: Bench, factors: Sequence[Factor], chosen: Subset) -> tuple[EngineSpec, EngineSpec]:
    """Rollout engine and trainer with some of the settings changed."""
    rollout, train = pair.rollout, pair.train
    for factor in factors:
        if factor.name in chosen:
            changed = _changed(factor, Pair(rollout, train), bench)[1]
            rollout, train = (rollout, changed) if factor.side == "train" else (changed, train)
    return rollout, train


def check_together(pair: Pair, bench: Bench, factors: Sequence[Factor]) -> None:
    """Refuse settings that a pair does not have, or of which one overwrites another.

    Raises: `NotOfferedError`; `BadValueError`.
    """
    for factor in factors:
        if lacking := factor.lacking(bench, pair.rollout):
            raise NotOfferedError(f"compound: {factor.name}: {lacking}")
    for one, other in combinations(factors, 2):
        both = frozenset({one.name, other.name})
        ways = {str(_specs(pair, bench, order, both)) for order in ((one, other), (other, one))}
        fewer = {str(_specs(pair, bench, factors, s)) for s in subsets(both) if s != both}
        if len(ways) > 1 or ways & fewer:
            raise BadValueError(f"compound: {one.name} and {other.name} set the same; name one of the two")
