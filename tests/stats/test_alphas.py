"""Mismatch and staleness, measured: against whole distributions, by grade, and the sentence that they lead to."""

import itertools

import pytest
import torch

from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift.stats import METRICS, Alphas, DriftStats, summarize
from offdrift.stats.alphas import NEAR, PAIRS


def policies(mismatch: float, staleness: float, *, tokens: int = 4000, vocab: int = 8, seed: int = 0):
    """Logits of mu, pi_old and pi at so many states, and a token that mu draws at each."""
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(tokens, vocab, generator=g, dtype=torch.float64)
    old = mu + mismatch * torch.randn(mu.shape, generator=g, dtype=torch.float64)
    new = old + staleness * torch.randn(mu.shape, generator=g, dtype=torch.float64)
    drawn = torch.multinomial(mu.softmax(-1), 1, generator=g)
    return [x.log_softmax(-1) for x in (mu, old, new)], drawn


def tv(a, b):
    return (a.exp() - b.exp()).abs().sum(-1) / 2


def stats_of(logs, drawn, **divergences):
    mu, old, new = (x.gather(-1, drawn).squeeze(-1) for x in logs)
    batch = LogProbs.pack(mu, new, old, segments=Segments.from_lengths([len(mu)]))
    return DriftStats.of(batch, divergences=divergences)


def exact(logs):
    return {
        name: Divergence.exact(name, tv(a, b))
        for name, (a, b) in zip(PAIRS, ((logs[0], logs[1]), (logs[1], logs[2]), (logs[0], logs[2])), strict=True)
    }


def test_exact_distances_are_those_of_the_distributions():
    logs, drawn = policies(0.1, 0.4)
    alphas = Alphas.of(summarize(stats_of(logs, drawn, **exact(logs))))
    for alpha, pair in ((alphas.mismatch, (logs[0], logs[1])), (alphas.staleness, (logs[1], logs[2]))):
        each = tv(*pair)
        assert alpha.grade == "exact"
        assert (alpha.low, alpha.mean) == pytest.approx((float(each.max()), float(each.mean())))
        assert alpha.high == alpha.low
        assert alpha.p95 == pytest.approx(float(each.quantile(0.95)), rel=0.15), "bins of a factor of two"
    assert (alphas.basis, alphas.invest) == ("largest", "staleness")
    assert "staleness" in alphas.sentence
    assert "(exact)" in alphas.sentence


def test_from_samples_the_mean_is_unbiased_and_the_largest_has_a_lower_end_alone():
    logs, drawn = policies(0.3, 0.3, tokens=40_000)
    alphas = Alphas.of(summarize(stats_of(logs, drawn)))
    truth = [tv(logs[0], logs[1]), tv(logs[1], logs[2])]
    for alpha, each in zip((alphas.mismatch, alphas.staleness), truth, strict=True):
        assert alpha.grade == "sampled"
        assert alpha.mean == pytest.approx(float(each.mean()), rel=0.02)
        assert 0 < alpha.low <= float(each.max()) * (1 + 1e-12), "reached where one token has the whole loss"
        assert (alpha.high, alpha.p95) == (None, None)
    # In expectation, exactly: every token in proportion to mu.
    mu, old, new = (x[:1] for x in logs)
    expected = sum(
        float(mu[0, y].exp()) * summarize(stats_of((mu, old, new), torch.tensor([[y]])))["staleness/tv_reweighted"]
        for y in range(8)
    )
    assert expected == pytest.approx(float(tv(old, new)), rel=1e-9)
    assert alphas.basis == "mean"
    assert "at least" in alphas.sentence
    assert "sampled tokens do not show" in alphas.sentence


def test_an_estimate_above_one_is_said_as_one():
    logs, drawn = policies(0.1, 0.1, tokens=64)
    row = summarize(stats_of(logs, drawn)) | {"mismatch/tv_sampled": 2.9}
    assert Alphas.of(row).mismatch.mean == 1.0


def test_intervals_decide_only_where_they_do_not_overlap():
    logs, drawn = policies(0.2, 0.2)
    ends = torch.full((len(drawn),), 0.1)

    def with_ends(mismatch, staleness, grade="interval"):
        names = ("tv_rollout_old", "tv_old_current")
        known = {
            name: Divergence.interval(name, low * ends, high * ends)
            for name, (low, high) in zip(names, (mismatch, staleness), strict=True)
        }
        return Alphas.of(summarize(stats_of(logs, drawn, **known)), grade=grade)

    clear = with_ends((4.0, 5.0), (1.0, 2.0))
    assert (clear.mismatch.low, clear.mismatch.high) == pytest.approx((0.4, 0.5))
    assert (clear.mismatch.grade, clear.invest) == ("interval", "mismatch")
    assert with_ends((4.0, 5.0), (1.0, 2.0), grade="capped interval").mismatch.grade == "capped interval"
    assert with_ends((1.0, 2.0), (4.0, 5.0)).invest == "staleness"
    assert with_ends((4.0, 5.0), (1.0, 3.5)).invest is None, "against the upper end, not the lower"
    assert with_ends((1.0, 3.5), (4.0, 5.0)).invest is None
    apart = with_ends((1.0, 3.0), (2.0, 4.0))
    assert (apart.basis, apart.invest) == ("largest", None)
    assert "overlap" in apart.sentence


def test_statistics_do_not_depend_on_how_a_batch_is_split():
    logs, drawn = policies(0.1, 0.2, tokens=300)
    whole = summarize(stats_of(logs, drawn, **exact(logs)))
    halves = [
        stats_of([x[s] for x in logs], drawn[s], **exact([x[s] for x in logs])) for s in (slice(0, 77), slice(77, 300))
    ]
    merged = summarize(halves[0].merge(halves[1]))
    names = [n for n in METRICS if n.startswith("divergence/tv_") or n == "staleness/tv_reweighted"]
    assert len([n for n in names if n in whole]) == 10
    for name in names:
        if name in whole:
            assert merged[name] == pytest.approx(whole[name], rel=1e-12), name


def row(mismatch=None, staleness=None, **more):
    values = dict(more)
    for key, x in (("tv_rollout_old", mismatch), ("tv_old_current", staleness)):
        if x is not None:
            mean, largest = x
            values |= {f"divergence/{key}_mean": mean, f"divergence/{key}_max": largest, f"divergence/{key}_p95": mean}
    return values


@pytest.mark.parametrize(
    ("mismatch", "staleness", "invest"),
    [
        ((0.01, 0.4), (0.001, 0.1), "mismatch"),
        ((0.001, 0.1), (0.01, 0.4), "staleness"),
        ((0.01, 0.3), (0.01, 0.3 / NEAR + 1e-9), "either"),
        ((0.0, 0.0), (0.0, 0.0), "neither"),
        ((0.0, 0.0), (0.01, 0.1), "staleness"),
    ],
)
def test_the_larger_part_of_the_bound_is_named(mismatch, staleness, invest):
    alphas = Alphas.of(row(mismatch, staleness))
    assert alphas.invest == invest
    assert alphas.as_dict()["invest"] == invest
    assert alphas.sentence.startswith("Where to invest: ")


def test_a_mean_that_says_the_opposite_is_said_too():
    sentence = Alphas.of(row((0.0001, 0.9), (0.01, 0.1))).sentence
    assert "Where to invest: mismatch" in sentence
    assert "On average over states staleness is the larger one" in sentence


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({}, "log-probs of three policies"),
        ({"full/tv_sampled": 0.1}, "logp_old"),
        ({"mismatch/tv_sampled": 0.1}, "(logp)"),
        ({"staleness/tv_reweighted": 0.1}, "logp_rollout"),
        ({"mismatch/tv_sampled": 0.0, "staleness/tv_reweighted": 0.1, "old/missing_frac": 1.0}, "bypass"),
    ],
)
def test_what_is_missing_is_named(fields, missing):
    alphas = Alphas.of(fields)
    assert (alphas.invest, alphas.basis) == (None, None)
    assert missing in alphas.missing
    assert missing in alphas.sentence
    assert "cannot be said" in alphas.sentence


def test_stale_old_log_probs_are_part_of_the_mismatch():
    fields = {"mismatch/tv_sampled": 0.2, "staleness/tv_reweighted": 0.01}
    assert "contains staleness" in Alphas.of(fields | {"old/stale_frac": 0.5}).sentence
    assert "contains staleness" not in Alphas.of(fields | {"old/stale_frac": 0.0}).sentence


def test_nothing_but_json_comes_out():
    import json

    for a, b in itertools.product((None, (0.1, 0.2)), repeat=2):
        json.dumps(Alphas.of(row(a, b)).as_dict(), allow_nan=False)
