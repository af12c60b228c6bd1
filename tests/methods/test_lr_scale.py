"""Scales of the learning rate: numbers of the methods table, their edges, and a step in pieces."""

import functools
import json
import math
from dataclasses import replace

import pytest
import torch

from offdrift.batch_info import NO_INFO, Observed
from offdrift.correction import Gate, Weight
from offdrift.errors import MethodError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, override
from offdrift.methods.lr_scale import EssScale, LengthSurge, SurgeState
from offdrift.segments import Segments
from tests.oracles.fixtures import double

UNLIMITED = Weight(on="full", unit="sequence")


def sequences_with(weights: list[float]) -> LogProbs:
    """Sequences of 2, 3, ... tokens with these products of full ratios."""
    lengths = torch.arange(len(weights)) + 2
    share = (double(weights).log() / lengths).repeat_interleave(lengths)
    logp = torch.full_like(share, -3.0)
    return LogProbs.pack(logp - share, logp, segments=Segments.from_lengths(lengths))


@pytest.mark.parametrize(
    ("weights", "ess", "scale"),
    [  # c.ess, c.lr
        ([1, 1, 1, 1], 1.0, 1.0),
        ([4, 1, 0.5, 0.5], 0.514286, 0.717137),
        ([8, 0.01, 0.01, 0.01], 0.251877, 0.501874),
        ([0.3], 1.0, 1.0),
    ],
)
def test_scale_of_the_learning_rate(weights, ess, scale):
    lp = sequences_with(weights)
    for power, expected in ((0.5, scale), (1.0, ess)):
        schedule = EssScale(power=power, weight=UNLIMITED)
        got = schedule.scale(schedule.observe(lp, None, NO_INFO))
        assert got.ndim == 0
        assert got.item() == pytest.approx(expected, abs=1e-6)


def test_reference_is_where_the_scale_begins_to_fall():
    lp = sequences_with([4, 1, 0.5, 0.5])
    for reference, expected in ((0.55, 18 / 35 / 0.55), (0.5, 1.0)):
        schedule = EssScale(power=1.0, reference=reference, weight=UNLIMITED)
        got = schedule.scale(schedule.observe(lp, None, NO_INFO))
        assert got.item() == pytest.approx(expected, rel=1e-9)


def test_weights_are_truncated_as_in_the_loss():
    lp = sequences_with([8, 1])
    got = EssScale(power=1.0).scale(EssScale().observe(lp, None, NO_INFO))
    assert got.item() == pytest.approx(9 / 10)  # (2 + 1)^2 / (2 (4 + 1))


def test_without_any_weight_the_scale_is_zero():
    masked = EssScale(weight=Weight(on="full", unit="sequence", cap=2.0, outside="mask"))
    for weights in ([8.0, 9.0], [8.0]):
        seen = masked.observe(sequences_with(weights), None, NO_INFO)
        assert seen["log_weight"] == -math.inf
        assert masked.scale(seen).item() == 0


@pytest.mark.parametrize("drift", [0.0, 0.3, 80.0, 5000.0])
def test_the_scale_is_right_at_any_drift_and_however_the_step_is_cut(drift):
    """log W of sequence i is drift * z_i: 1 at no drift, the definition at a mild one, sqrt(1 / B) where one is all."""
    z = torch.tensor([0.9, -1.1, 0.2, 1.0, -0.4, -0.6, 0.1, -0.1], dtype=torch.float64)
    w = (drift * (z - z.max())).exp()
    expected = math.sqrt(w.sum() ** 2 / (8 * w.square().sum()))
    zero = torch.full((8,), -5.0, dtype=torch.float64)
    lp = LogProbs.pack(zero, zero + drift * (z - 1), segments=Segments.from_lengths([1] * 8))
    row = override(METHODS["vcpo"], {"lr_scale.truncated": False})
    scale = row.lr_scale
    whole = scale.scale(scale.observe(lp, None, NO_INFO))
    assert whole.item() == pytest.approx(expected, rel=1e-9)
    assert (drift > 0) or whole.item() == 1.0
    assert (drift < 80) or whole.item() == pytest.approx(math.sqrt(1 / 8), rel=1e-3)
    parts = [
        LogProbs.pack(zero[s], (zero + drift * (z - 1))[s], segments=Segments.from_lengths([1] * len(zero[s])))
        for s in (slice(0, 1), slice(1, 4), slice(4, 8))
    ]
    observed = functools.reduce(Observed.merge, [row.observe(p, torch.zeros(len(p.logp)), NO_INFO) for p in parts])
    assert scale.scale(observed.parts[scale]).item() == pytest.approx(expected, rel=1e-9)


def test_where_every_weight_is_at_its_cap_only_weights_as_they_are_show_the_drift():
    lp = sequences_with([math.e**70, math.e**60, 3.0])
    row = METHODS["vcpo"]
    for changes, expected in (({}, 1.0), ({"lr_scale.truncated": False}, math.sqrt(1 / 3))):
        scale = override(row, changes).lr_scale
        assert scale.scale(scale.observe(lp, None, NO_INFO)).item() == pytest.approx(expected, rel=1e-3)


def test_the_scale_counts_the_weights_that_the_loss_has():
    """The cap that an arm sets, and a gate that leaves one sequence of four: its weight is all there is."""
    lp, none = sequences_with([8.0, 1.0, 1.0, 1.0]), torch.zeros(14)
    capped = override(METHODS["vcpo"], {"weight.cap": 4.0, "lr_scale.power": 1.0})
    assert capped.lr_scale.weight == capped.correction.weights[0]
    gate = Gate(statistic="ratio", on="full", unit="seq_sum", low=2.0)
    for row, ess in ((capped, 49 / 76), (replace(capped, correction=capped.correction & gate), 1 / 4)):
        observed = row.observe(lp, none, NO_INFO)
        assert row.lr_scale.scale(observed.parts[row.lr_scale]).item() == pytest.approx(ess, rel=1e-6)


def test_sequences_without_a_token_do_not_count():
    lp = sequences_with([4, 1, 0.5, 0.5])
    holes = LogProbs.pack(lp.logp_rollout, lp.current, segments=Segments.from_lengths([0, 2, 3, 0, 4, 5]))
    schedule = EssScale(weight=UNLIMITED)
    got, expected = (schedule.observe(x, None, NO_INFO) for x in (holes, lp))
    assert got == expected
    assert got["count"] == 4


def test_the_formula_names_the_numbers():
    assert EssScale(power=1.0, reference=0.55).formula == (
        "lr x min(1, ess / 0.55)^1, ess of weight sequence ratio(full), truncate above 2"
    )


@pytest.mark.parametrize(
    "parts",
    [
        {"power": 0.0},
        {"reference": 1.5},
        {"reference": math.nan},
        {"weight": Weight(on="full", unit="token")},
        {"weight": Weight(on="full", unit="sequence", normalize=True)},
    ],
)
def test_scales_that_cannot_mean_anything_are_refused(parts):
    with pytest.raises(MethodError, match=next(iter(parts))):
        EssScale(**parts)


def run(schedule: LengthSurge, lengths: list[float]) -> list[SurgeState]:
    states = [SurgeState()]
    for length in lengths:
        states.append(schedule.after(states[-1], length))
    return states


def test_periods_after_a_surge():
    states = run(LengthSurge(), [100.0] * 109 + [300.5] + [400.0] * 800)
    steps = [110, 111, 308, 309, 506, 507, 704, 705, 902, 903]  # c.surge
    expected = [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1]
    assert [states[step].scale for step in steps] == expected
    assert [s.step for s in states if s.fired] == [110]
    assert states[-1].surge == 110
    assert int(1.8 * 110) == 198


@pytest.mark.parametrize(("length", "fires"), [(300.0, False), (300.1, True)])
def test_a_surge_is_more_than_three_times_the_first_fifty(length, fires):
    first = [99.0, 101.0] * 25
    assert run(LengthSurge(), [*first, length])[-1].fired == fires
    assert not any(s.fired for s in run(LengthSurge(), [*first[:-1], length]))


def test_slow_growth_is_a_surge_over_the_first_fifty_but_not_over_the_last_hundred():
    lengths = [100.0 * 1.001**t for t in range(2000)]  # 1.105 times in 100 steps
    assert not any(s.fired for s in run(LengthSurge(mode="survey"), lengths))
    (fired,) = [s.step for s in run(LengthSurge(), lengths) if s.fired]
    base = sum(lengths[:50]) / 50
    assert lengths[fired - 1] > 3 * base >= lengths[fired - 2]


@pytest.mark.parametrize(("length", "fires"), [(121.0, True), (120.0, False)])
def test_the_rule_of_the_survey(length, fires):
    states = run(LengthSurge(mode="survey"), [100.0] + [110.0] * 99 + [length])
    assert [s.fired for s in states] == [False] * 101 + [fires]
    assert states[-1].scale == (0.5 if fires else 1.0)


def test_the_survey_rule_rests_after_it_fired_and_stops_at_the_floor():
    lengths = [100 * 1.01**t for t in range(600)]  # grows 2.7 times in 100 steps, always
    states = run(LengthSurge(mode="survey", cooldown=30), lengths)
    fired = [s.step for s in states if s.fired]
    assert fired[:3] == [101, 132, 163]
    assert [states[t].scale for t in fired[:5]] == [0.5, 0.25, 0.125, 0.1, 0.1]
    assert max(len(s.lengths) for s in states) == 100


@pytest.mark.parametrize("mode", ["period", "survey"])
def test_a_state_survives_a_checkpoint(mode):
    schedule = LengthSurge(mode=mode, window=3)
    lengths = [10.0, 10.0, 10.0, 50.0, 60.0, 200.0]
    states = run(schedule, lengths)
    for cut in range(7):
        fields = json.loads(json.dumps(states[cut]._asdict()))
        state = SurgeState(**{**fields, "lengths": tuple(fields["lengths"])})
        for length in lengths[cut:]:
            state = schedule.after(state, length)
        assert state == states[-1]
    assert any(s.fired for s in states)


@pytest.mark.parametrize(
    "parts", [{"threshold": 0.0}, {"window": 0}, {"period": -1.0}, {"factor": 1.0}, {"floor": 2.0}, {"cooldown": -1}]
)
def test_surges_that_cannot_mean_anything_are_refused(parts):
    with pytest.raises(MethodError, match=next(iter(parts))):
        LengthSurge(**parts)
