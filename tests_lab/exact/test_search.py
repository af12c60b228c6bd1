"""The search sees what it should: every bound, every pair, wrong constants, and its own rounding."""

import itertools
import math
from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
import torch

from offdrift.certificate.bounds import ROWS
from offdrift.errors import BadValueError
from offdrift_lab.exact import TabularPolicy, random_policies
from offdrift_lab.exact.markov import counter
from offdrift_lab.exact.pairs import FAMILIES, HORIZONS, MACHINES, TREES, batches, enumerated, masked
from offdrift_lab.exact.policy import tilted_pair
from offdrift_lab.exact.search import (
    GOALS,
    OTHERS,
    ROW_NAMES,
    TABLE,
    arenas,
    attack,
    bound_values,
    check,
    of_drift,
    remembering,
    smooth_bounds,
    summarize,
    tree,
)
from offdrift_lab.exact.statements import LABELS, STATEMENTS


@pytest.fixture(autouse=True)
def _without_shape_checks(monkeypatch: pytest.MonkeyPatch):
    """The checks cost many times the bounds themselves; every other test runs with them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture(scope="module")
def pairs():
    """Pairs of every kind and size up to 16 tokens, which many tests share, and what the check finds in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        found = list(batches(900, seed=3, longest=16))
        return [(batch, check(batch)) for batch in found]


def _tilted(eps: float, horizon: int):
    mu, pi = tilted_pair(eps, horizon=horizon)
    return enumerated("tilted", 2, horizon, mu, pi)


def test_the_pairs_are_as_many_and_as_different_as_asked(pairs):
    found = list(batches(800, seed=1, longest=64))
    assert max(batch.horizon for batch, _ in pairs) == 16
    assert sum(len(b.error) for b in found) == 800
    assert {(b.vocab, b.horizon) for b in found if b.enumerated} == set(TREES)
    assert {b.horizon for b in found if not b.enumerated} == {t for t in HORIZONS if t <= 64}
    kinds = {b.family.split(":")[0] for b in found}
    assert kinds == set(FAMILIES) | {"several prompts"} | set(MACHINES)
    eps = torch.cat([b.divergences.tv_max for b in found])
    for low, high in itertools.pairwise((0.0, 1e-3, 1e-2, 1e-1, 1.1)):
        assert 20 < int(((eps >= low) & (eps < high)).sum()) < 600
    few, again = (list(batches(7, seed=0, longest=8)) for _ in "ab")
    assert sum(len(b.error) for b in few) == 7
    assert all(torch.equal(a.error, b.error) for a, b in zip(few, again, strict=True))


def test_sharp_constants_times_nine_tenths_are_refuted_at_two_tokens():
    batch = _tilted(0.01, 2)
    assert summarize([check(batch)])[0].violations == 0
    rows = summarize([check(batch, factor=0.9)])
    refuted = {r.bound for r in rows if r.constants == "sharp" and r.violations}
    assert refuted == set(GOALS) - {"mixed_kl", "mixed_tv", "sequence_kl"}
    assert all(r.violations == 0 for r in rows if r.constants == "paper")


@pytest.mark.slow
def test_random_pairs_notice_a_planted_constant(pairs):
    outcomes = [check(batch, factor=0.9) for batch, _ in pairs]
    wrong = {r.bound for r in summarize(outcomes) if r.violations}
    assert {"coupling", "adaptive", "pointwise", "pinsker_marginal_kl"} <= wrong
    where = {o.horizon for o in outcomes if o.violated.any()}
    assert 2 in where


def test_every_bound_is_checked_on_every_pair(pairs):
    rows = {(r.bound, r.constants): r for r in summarize(outcome for _, outcome in pairs)}
    assert set(rows) == set(ROW_NAMES)
    assert len(rows) == 10 + 12 + 3 + 16
    for key in TABLE:
        assert rows[key].checked == 900, key
    for key in ROW_NAMES[len(TABLE) :]:
        assert 225 < rows[key].checked < 900, key  # enumerated pairs on one prompt, most of full support


def test_each_guarantee_without_preconditions_can_fail(pairs):
    """A pair comes close to each bound; times a little less than how close it comes, the bound is refuted."""
    tried = [(batch, outcome) for batch, outcome in pairs if batch.masked is not None]
    assert not any(outcome.violated.any() for _, outcome in tried)
    for name in OTHERS + ROW_NAMES[-len(LABELS) :]:
        column = ROW_NAMES.index(name)
        largest = [np.nanmax(outcome.tightness[:, column], initial=0.0) for _, outcome in tried]
        best = int(np.argmax(largest))
        assert (0.03 if name[0] == "Hellinger" else 0.2) < largest[best] < 1 + 1e-9, name
        assert check(tried[best][0], factor=0.95 * largest[best]).violated[:, column].any(), name


@pytest.mark.parametrize("name", LABELS)
def test_a_statement_s_bound_that_is_not_a_number_is_a_violation(name: str):
    mu, pi = tilted_pair(0.1, horizon=2)
    batch = enumerated("tilted", 2, 2, mu, pi, STATEMENTS)
    column = ROW_NAMES.index((name, "sharp"))
    assert not check(batch).violated.any()
    broken = replace(batch.sides[name], bound=torch.tensor([math.nan], dtype=torch.float64))
    outcome = check(replace(batch, sides={**batch.sides, name: broken}))
    assert outcome.violated[0].nonzero()[0].tolist() == [column]


def test_an_error_that_is_not_a_number_is_a_violation():
    batch = _tilted(0.1, 2)
    outcome = check(replace(batch, error=torch.tensor([math.nan], dtype=torch.float64)))
    assert outcome.violated[:, : len(TABLE)].all()


def test_one_token_and_no_drift_leave_nothing_to_compare():
    for batch in (_tilted(0.1, 1), _tilted(0.0, 3)):
        outcome = check(batch)
        assert not outcome.violated.any()
        known = {ROW_NAMES[i][0] for i in np.flatnonzero(~np.isnan(outcome.tightness[0]))}
        assert known <= {"mixed_kl", "mixed_tv", "sequence_kl"}
        assert float(np.nanmax(outcome.tightness, initial=0.0)) == 0


def test_rounding_never_hides_a_real_violation():
    # What is allowed on top of a bound stays a millionth of it at every drift that is searched.
    for eps in (1e-2, 1e-4, 1e-8):
        outcome = check(_tilted(eps, 2), factor=1 - 1e-5)
        column = ROW_NAMES.index(("coupling", "sharp"))
        assert outcome.violated[0, column], eps
        assert not check(_tilted(eps, 2)).violated.any(), eps
    # Sides of statements hold sums whose mean is 0 only up to a rounding, so less is seen at the smallest drift.
    attained = (
        "two-sided identity: worst case over R",
        "variance along sequences",
        "variance from the largest chi-squared",
    )
    for eps, share in ((1e-2, 1e-5), (1e-4, 1e-5), (1e-6, 1e-2)):
        mu, pi = tilted_pair(eps, horizon=2)
        batch = enumerated("tilted", 2, 2, mu, pi, STATEMENTS)
        assert not check(batch).violated.any(), eps
        wrong = check(batch, factor=1 - share).violated[0]
        assert all(wrong[ROW_NAMES.index((name, "sharp"))] for name in attained), eps


@pytest.mark.slow
def test_the_smooth_bounds_are_the_library_s():
    compared = 0
    for batch in batches(400, seed=4, longest=64):
        smooth = smooth_bounds(batch.divergences, batch.horizon).T.numpy()
        table = bound_values(batch)
        for column, name in enumerate(GOALS):
            want = table[:, TABLE.index((name, "sharp"))]
            # The library refuses nothing here, so both see the same numbers; inf where KL is.
            assert np.allclose(smooth[:, column], want, rtol=1e-9, atol=0), name
            compared += len(want)
    assert compared == 400 * len(GOALS)
    assert [name for name in ROWS if name not in GOALS] == ["two_sided", "variance", "sequence_hellinger"]


def test_masks_agree_with_a_loop_over_sequences():
    g = torch.Generator().manual_seed(6)
    mu = random_policies(4, vocab=3, horizon=3, generator=g)
    pi = random_policies(4, vocab=3, horizon=3, generator=g)
    m = masked(mu, pi)
    for i in range(4):
        rows = []
        limit = float(torch.cat([_kl(a[i], b[i]) for a, b in zip(mu.levels, pi.levels)]).max()) / 2
        for tokens in itertools.product(range(3), repeat=3):
            p = q = 1.0
            ratios, context, inside, prefix = [], 0, True, 0.0
            for t, token in enumerate(tokens):
                a, b = mu.levels[t][i, context], pi.levels[t][i, context]
                inside = inside and float(_kl(a, b)) <= limit
                prefix += float(_kl(a, b)) * inside
                p, q = p * float(a[token]), q * float(b[token])
                ratios.append(float(b[token] / a[token]))
                context = context * 3 + token
            over = p * (sum(ratios) - 3 - (q / p - 1))  # mu (sum (w_t - 1) - (w - 1))
            rows.append((p, q, max(abs(math.log(w)) for w in ratios), inside, prefix, over))
        tau = sorted(r[2] for r in rows)[13]
        assert float(m.tau[i]) == pytest.approx(tau)
        want = {
            "rejected": sum(r[0] for r in rows if r[2] > tau * (1 + 1e-12)),
            "overstated": sum(max(r[5], 0) for r in rows if r[2] <= tau * (1 + 1e-12)),
            "lost": sum(max(r[0] - r[1], 0) for r in rows if r[2] > tau * (1 + 1e-12)),
            "prefix_kl": sum(r[0] * r[4] for r in rows),
            "overstated_kl": sum(max(r[5], 0) for r in rows if r[3]),
        }
        got = {name: float(getattr(m, name)[i]) for name in want}
        assert got == pytest.approx(want, rel=1e-10)
        assert min(want.values()) > 0


def _kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * (a / b).log()).sum(-1)


def test_a_region_that_no_sequence_enters_is_left_out():
    mu = TabularPolicy.independent([[1.0, 0.0], [0.5, 0.5]])
    pi = TabularPolicy.independent([[0.0, 1.0], [0.5, 0.5]])  # nothing in common
    batch = replace(enumerated("apart", 2, 2, mu, pi), masked=masked(mu, pi))
    outcome = check(batch)
    assert not outcome.violated.any()
    assert outcome.checked[0, [ROW_NAMES.index(k) for k in OTHERS[:2]]].tolist() == [False, False]


def test_the_search_attains_what_two_tokens_attain():
    """The sharp constants; of statements the variance and worst-case forms, and the token ends of the two-sided one."""
    batch = attack(tree(2, 2), restarts=3, steps=120, seed=0)
    found = check(batch)
    assert not found.violated.any()
    assert check(batch, factor=0.9).violated.any()
    rows = {r.bound: r.largest for r in summarize([found]) if r.constants == "sharp"}
    attained = {name for name, share in rows.items() if share > 0.99}
    assert attained >= {
        *(set(GOALS) - {"mixed_kl", "mixed_tv", "sequence_kl"}),
        "variance along sequences",
        "variance from the largest chi-squared",
        "two-sided identity: lower end, E[R sum k3(w_t)]",
        "two-sided identity: upper end, E[(1-R) sum k3(w_t)]",
        "two-sided identity: worst case over R",
    }
    # The first position counts in the mixed bounds, although nothing can have shifted there.
    assert rows["mixed_tv"] == pytest.approx(0.5, abs=0.01)
    assert rows["mixed_kl"] < 0.51
    assert 0.4 < rows["sequence_kl"] <= 1
    assert rows["Hellinger"] > 2 / 37
    # Half of the bound is what small drift tends to; an ascent that climbs rounding would report a multiple of it.
    assert 0.49 < rows["trained objectives: no weights"] < 0.55


def test_steps_find_more_than_starts():
    arena = remembering("parity", counter(2, 2), 16)
    first, last = (
        np.nanmax(check(attack(arena, restarts=3, steps=n, seed=1)).tightness[:, : len(TABLE)], axis=0) for n in (0, 40)
    )
    assert (last > first).all()


def test_ticks_and_names_of_the_search():
    ticks = []
    attack(tree(2, 2), restarts=1, steps=5, seed=0, tick=lambda: ticks.append(1))
    assert len(ticks) == 5
    names = [a.name for a in arenas()]
    assert len(set(names)) == len(names) > 10


def test_outcomes_by_size_of_drift(pairs):
    outcomes = [outcome for _, outcome in pairs]
    edges = (0.0, 1e-2, 1e-1, math.inf)
    parts = [[of_drift(o, *e) for o in outcomes] for e in itertools.pairwise(edges)]
    counts = [sum(len(o.eps) for o in part) for part in parts]
    assert sum(counts) == 900
    assert min(counts) > 60
    assert summarize([]) == []


def test_what_cannot_be_searched_is_refused():
    with pytest.raises(BadValueError, match="pairs = 0"):
        next(batches(0, seed=0))
    with pytest.raises(BadValueError, match="restarts = 0"):
        attack(tree(2, 2), restarts=0, steps=1, seed=0)
    with pytest.raises(BadValueError, match="steps = -1"):
        attack(tree(2, 2), restarts=1, steps=-1, seed=0)
    row = torch.ones(1, 1, 1, dtype=torch.float64)
    with pytest.raises(BadValueError, match="vocabulary of 1 token"):
        TabularPolicy((row,))
