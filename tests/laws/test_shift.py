"""A constant added to every log-ratio of a step changes nothing that is a ratio of sums of ratios.

Sums of log-ratios drift away from 0 with the length of a response, and only their differences say
how unevenly sequences count. Up to 10^4 nats either way, whole and in pieces.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offdrift.advantages import advantages as estimated
from offdrift.audit.counterfactual import CANDIDATES, Counterfactual
from offdrift.audit.partial import AuditPartial
from offdrift.audit.tally import Tally
from offdrift.batch_info import BatchInfo, Observed
from offdrift.correction import Correction, Weight
from offdrift.laws.batches import Batch, Given, packed, run, seen
from offdrift.methods import METHODS
from offdrift.methods.lr_scale import EssScale
from offdrift.ratios import per_unit, stopped_log_ratio
from offdrift.records.batch import Logged
from offdrift.stats import DriftStats, summarize
from tests.laws.handmade import made

LENGTH, SEQUENCES = 20, 6
SHIFTS = (-1e4, -300.0, -50.0, -19.0, 19.0, 50.0, 300.0, 1e4)
"""Nats per sequence; a twentieth of it per token."""
RATIOS = ("full", "mismatch", "staleness")
SPLIT = [[3], [0, 5], [1, 2, 4]]
ALL = [(n, i, w) for n, row in METHODS.items() for i, w in enumerate(row.correction.weights)]
WEIGHTS = [(n, i) for n, i, w in ALL if isinstance(w, Weight)]
NORMALIZED = [(n, i) for n, i, w in ALL if isinstance(w, Weight) and w.normalize]
SCALED = [n for n, row in METHODS.items() if row.lr_scale is not None]
close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=0)


def shifted(on: str, shift: float) -> Batch:
    """Six sequences of twenty tokens whose sums spread over some nats around `shift`."""
    g = torch.Generator().manual_seed(3)
    spread = torch.randn(SEQUENCES, 1, generator=g, dtype=torch.float64).repeat(1, LENGTH)
    tokens = 0.05 * spread + 0.1 * torch.randn(SEQUENCES, LENGTH, generator=g, dtype=torch.float64)
    l = (tokens + shift / LENGTH).flatten().tolist()  # noqa: E741
    a = (torch.randn(SEQUENCES, 1, generator=g).repeat(1, LENGTH)).flatten().tolist()
    return made(on, l, a, turns=[[8, 12]] * SEQUENCES, aside=0.0)


def pieces(batch: Batch) -> list[Given]:
    return [packed(batch.chosen(which)) for which in SPLIT]


def ess(log_w: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) by its definition, the largest w taken out."""
    w = (log_w - log_w.max()).exp()
    return float(w.sum() ** 2 / (len(w) * (w * w).sum()))


def without_limits(weight: Weight) -> Weight:
    return replace(weight, cap=None, floor=None, growth=0.0)


# -- normalized weights and scales, by row --------------------------------------------------------


def weights_of(part: Weight, batch: Batch) -> Tensor:
    given = packed(batch)
    return part(given.lp, given.advantages, BatchInfo()).weight


def weights_in_pieces(part: Weight, batch: Batch) -> Tensor:
    given = pieces(batch)
    saw = [Observed({part: part.observe(x.lp, x.advantages, BatchInfo())}) for x in given]
    batch_info = BatchInfo(observed=functools.reduce(Observed.merge, saw))
    found = torch.full((SEQUENCES * LENGTH,), math.nan, dtype=torch.float64)
    for which, x in zip(SPLIT, given, strict=True):
        found[batch.rows(which)] = part(x.lp, x.advantages, batch_info).weight
    return found


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize(("name", "i"), NORMALIZED)
def test_no_normalized_weight_of_a_row_changes(name, i, shift):
    weight = METHODS[name].correction.weights[i]
    # Its own cap may act above 0, and normalizing comes after it.
    for part, base in ((without_limits(weight), 0.0), (weight, -60.0)):
        if part is weight and shift > -50:
            continue
        expected = weights_of(part, shifted(part.on, base))
        assert expected.std() > 0.1
        for found in (weights_of, weights_in_pieces):
            close(found(part, shifted(part.on, shift)), expected, rtol=1e-7)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("unit", ["token", "sequence", "geometric", "turn"])
def test_nor_of_any_unit(unit, shift):
    part = Weight(on="full", unit=unit, normalize=True)
    expected = weights_of(part, shifted("full", 0.0))
    close(weights_in_pieces(part, shifted("full", shift)), expected, rtol=1e-7)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("name", SCALED)
def test_no_scale_of_the_learning_rate_changes(name, shift):
    row = METHODS[name]
    assert isinstance(row.lr_scale, EssScale)
    free = replace(row, lr_scale=replace(row.lr_scale, weight=without_limits(row.lr_scale.weight)))
    for row_, base in ((free, 0.0), (row, -60.0)):
        if row_ is row and shift > -50:
            continue
        schedule, on = row_.lr_scale, row_.lr_scale.weight.on
        expected = scale_of([packed(shifted(on, base))], row_)
        assert 0.4 < expected < 0.99
        for split in ([packed(shifted(on, shift))], pieces(shifted(on, shift))):
            assert scale_of(split, row_) == pytest.approx(expected, rel=1e-7)
        assert schedule is not None


def scale_of(given: list[Given], row) -> float:
    observed = functools.reduce(Observed.merge, [seen(row, x) for x in given])
    return float(row.lr_scale.scale(observed.parts[row.lr_scale]))


def test_the_table_has_such_rows():
    assert len(NORMALIZED) >= 1
    assert len(SCALED) >= 1


# -- effective sample sizes ---------------------------------------------------------------------


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("on", RATIOS)
def test_no_effective_sample_size_of_ratios_changes(on, shift):
    names = [f"{on}/ess_frac", f"{on}/ess_seq_frac"]
    expected = summarize(DriftStats.of(packed(shifted(on, 0.0)).lp))
    whole = DriftStats.of(packed(shifted(on, shift)).lp)
    merged = DriftStats.merge_all(DriftStats.of(x.lp) for x in pieces(shifted(on, shift)))
    for stats in (whole, merged, merged.cpu()):
        found = summarize(stats)
        for name in names:
            assert expected[name] < 0.999
            assert found[name] == pytest.approx(expected[name], rel=1e-7), name


@pytest.mark.parametrize("shift", [0.0, *SHIFTS])
@pytest.mark.parametrize(("name", "i"), WEIGHTS)
def test_the_effective_sample_size_of_a_rows_weights_is_that_of_the_ratios(name, i, shift):
    """Whatever the unit; where advantage or outcome decides, the other tokens weigh 1."""
    weight = replace(without_limits(METHODS[name].correction.weights[i]), normalize=False)
    row = replace(METHODS[name], correction=Correction(weights=(weight,)), anchor=None)
    given = packed(shifted(weight.on, shift))
    ratios = stopped_log_ratio(given.lp, on=weight.on)
    log_w = per_unit(ratios, given.lp.segments, unit=weight.unit)
    if weight.saturation is not None:
        log_w = log_w - torch.logaddexp(log_w, torch.tensor(math.log(weight.saturation)).double())
    if weight.gaussian is not None:
        log_w = log_w - (log_w / weight.gaussian) ** 2 / 2
    if weight.advantage != "any":
        sign = 1 if weight.advantage == "positive" else -1
        log_w = log_w.where(sign * given.advantages > 0, 0.0)
    if weight.outcome != "any":
        correct = given.batch_info.rewards > weight.correct_above
        about = correct if weight.outcome == "correct" else ~correct
        log_w = log_w.where(given.lp.segments.spread(about), 0.0)
    parts = [run(row, x).result.stats for x in pieces(shifted(weight.on, shift))]
    for stats in (run(row, given).result.stats, DriftStats.merge_all(parts)):
        assert summarize(stats)["weight/ess_frac"] == pytest.approx(ess(log_w), rel=1e-7)


def test_tokens_that_were_not_scored_leave_it_to_the_others():
    weight = Weight(on="full", unit="token")
    row = replace(METHODS["none"], correction=Correction(weights=(weight,)))
    batch = shifted("full", -1e4)
    mu = batch.tokens["mu"].clone()
    mu[::7] = -9999.0
    scored = mu > -1000
    got = run(row, packed(batch.with_tokens(mu=mu))).result.stats
    expected = ess((batch.tokens["pi"] - batch.tokens["mu"])[scored])
    assert summarize(got)["weight/ess_frac"] == pytest.approx(expected, rel=1e-7)


def test_two_weights_of_a_token_are_guarded_one_by_one():
    """e^-1000 times e^5: the product is guarded at e^-15, which a look at it would not show."""
    x = torch.tensor([-1000.0, -1001.0, -999.5, -1000.5], dtype=torch.float64)
    batch = made("mismatch", x.tolist(), [1.0] * 4, aside=5.0)
    both = Correction(weights=(Weight(on="mismatch"), Weight(on="staleness")))
    got = run(replace(METHODS["none"], correction=both), packed(batch)).result.stats
    assert summarize(got)["weight/ess_frac"] == pytest.approx(ess(x), rel=1e-7)


# -- audits -------------------------------------------------------------------------------------


def logged(batch: Batch) -> Logged:
    given, b = packed(batch), len(batch.lengths)
    return Logged(
        cu_seqlens=given.lp.segments.cu_seqlens,
        step=torch.arange(b) // 2,
        row=torch.arange(b),
        response_lengths=given.lp.segments.lengths,
        logp_rollout=batch.tokens["mu"],
        logp_old=batch.tokens["old"],
        logp=batch.tokens["pi"],
        advantages=given.advantages,
    )


def tallied(batch: Batch) -> list[Tally]:
    """Of the whole, merged of pieces, and what is stored of it."""
    parts = [Tally.of(logged(batch.chosen(which))) for which in SPLIT]
    merged = functools.reduce(Tally.merge, parts)
    return [Tally.of(logged(batch)), merged, AuditPartial.from_bytes(AuditPartial(tally=merged).to_bytes()).tally]


@pytest.mark.parametrize("shift", SHIFTS)
def test_no_effective_sample_size_of_an_audit_changes(shift):
    (expected, *_), found = tallied(shifted("full", 0.0)), tallied(shifted("full", shift))
    overall, buckets = expected.as_dict()["overall"], ess_by_bucket(expected)
    assert len(buckets) >= 5
    for tally in found:
        told = tally.as_dict()["overall"]
        for name in ("full/ess_frac", "full/ess_seq_frac"):
            assert told[name] == pytest.approx(overall[name], rel=1e-6), name
        assert ess_by_bucket(tally) == pytest.approx(buckets, rel=1e-6)


def ess_by_bucket(tally: Tally) -> list[float]:
    """Along the axes on which a shift moves no token."""
    facets = tally.as_dict()["facets"]
    axes = ("length", "position", "advantage")
    return [r["full/ess_frac"] for axis in axes for r in facets[axis] if "full/ess_frac" in r]


FREE = [
    name
    for name, c in CANDIDATES.items()
    if (weights := c.method.correction.weights)
    and not c.method.correction.gates
    and all(isinstance(w, Weight) and not w.floor and w.advantage == "any" for w in weights)
    and all(w.unit in ("token", "sequence", "geometric") and w.saturation is None for w in weights)
    and all(w.gaussian is None for w in weights)
]


@pytest.mark.parametrize("shift", [-1e4, -300.0])
def test_nor_that_of_any_row_of_the_method_table(shift):
    """Far below any cap, and above none: nothing but the shift is left."""

    def table(amount: float) -> dict[str, float]:
        batch = shifted("full", amount)
        half = batch.with_tokens(old=(batch.tokens["mu"] + batch.tokens["pi"]) / 2)
        parts = [Counterfactual.of(logged(half.chosen(which))) for which in SPLIT]
        merged = functools.reduce(Counterfactual.merge, parts)
        again = AuditPartial.from_bytes(AuditPartial(counterfactual=merged).to_bytes()).counterfactual
        assert again.table() == merged.table()
        return {r["name"]: r["ess_frac"] for r in merged.table() if r["why_not"] is None}

    expected, found = table(-100.0), table(shift)
    tried = [name for name in FREE if name in expected]
    assert len(tried) >= 8
    for name in tried:
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name
    assert found["full_is"] < 0.9


# -- baselines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["optimal_token_baseline", "tir_optimal_token_baseline", "opob"])
@pytest.mark.parametrize("size", [1e-9, 1e-3, 1e8])
def test_no_weighted_baseline_changes_with_the_size_of_all_weights(how, size):
    given = packed(shifted("full", 0.0))
    segments = replace(given.lp.segments, group_ids=torch.zeros(SEQUENCES).long())
    g = torch.Generator().manual_seed(5)
    weight = segments.spread(0.5 + torch.rand(SEQUENCES, generator=g, dtype=torch.float64))
    rewards = torch.rand(SEQUENCES, generator=g, dtype=torch.float64)

    def found(w: Tensor) -> Tensor:
        policy = {"logp_old": given.lp.old, "sum_pi_squared": given.lp.old.exp().square()}
        return estimated(rewards, segments, how=how, weight=w, **policy)

    torch.testing.assert_close(found(size * weight), found(weight), rtol=0, atol=1e-7)
