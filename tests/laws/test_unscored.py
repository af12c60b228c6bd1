"""A token that the engine did not score: as if masked, in every row, except in the denominators."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offdrift.laws.batches import Batch, Given, draw, packed, run, segments_of, with_batch_info
from offdrift.logprobs import UNSCORED_BELOW, LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, Method
from offdrift.stats import DriftStats, summarize
from offdrift.stats.drift import Tails
from offdrift.stats.signature import signature

every_row = pytest.mark.parametrize("name", METHODS)
SENTINELS = (-math.inf, -9999.0, UNSCORED_BELOW)


def lost(seed: int, share: float = 0.3) -> Tensor:
    """Which tokens of a batch have no rollout log-prob: some of many sequences, and all of one."""
    batch = draw(seed)
    g = torch.Generator().manual_seed(seed)
    found = torch.rand(sum(batch.lengths), generator=g) < share
    found[batch.rows([seed % 8])] = True
    return found


def unscored(seed: int) -> Given:
    gone = lost(seed)
    mu = draw(seed).tokens["mu"].masked_fill(gone, SENTINELS[seed % 3])
    return packed(draw(seed).with_tokens(mu=mu))


def without(seed: int) -> Given:
    """The same batch with those tokens masked."""
    batch, gone = draw(seed), lost(seed)
    t, leaf = batch.tokens, batch.tokens["pi"].clone().requires_grad_()
    segments = segments_of(batch.turns, batch.groups)
    lp = LogProbs.pack(t["mu"], leaf, t["old"], logp_ref=t["ref"], mask=~gone, segments=segments)
    return with_batch_info(lp, leaf, batch.rewards, t)


def summed(name: str) -> Method:
    """The row with a denominator that does not count tokens."""
    return replace(METHODS[name], aggregate="seq_mean_token_sum", normalizer="sampled")


@every_row
def test_it_is_as_if_masked_for_every_other_token(name):
    row = replace(summed(name), penalty=None)
    for seed in range(4):
        got, expected, gone = run(row, unscored(seed)), run(row, without(seed)), lost(seed)
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-12, atol=1e-12)
        assert gone.any()
        assert (got.grad[gone] == 0).all()
        assert not got.keep[gone].any()
        assert torch.equal(got.keep[~gone], expected.keep)
        for rejected in got.result.corrected.rejected_by.values():
            assert not rejected[gone].any()


@every_row
def test_it_stays_in_the_denominators(name):
    row, given = METHODS[name], unscored(1)
    whole = run(row, packed(draw(1)), normalizer=None, horizon=12)
    got = run(row, given, normalizer=None, horizon=12)
    assert got.loss.isfinite()
    assert whole.loss.isfinite()
    if row.normalizer == "sampled" and row.aggregate == "token_mean":
        one = run(row, given, normalizer=1.0)
        torch.testing.assert_close(got.loss, one.loss / len(given.advantages))


@every_row
def test_the_penalty_acts_on_it_as_on_a_rejected_token(name):
    row, gone = summed(name), lost(2)
    if row.penalty is None or row.penalty.place != "loss":
        row = replace(
            row,
            penalty=next(r.penalty for r in METHODS.values() if r.penalty is not None and r.penalty.place == "loss"),
        )
    got = run(row, unscored(2)).grad[gone]
    assert (got != 0).all() if row.gate_scope == "policy" else (got == 0).all()
    assert (run(replace(row, gate_scope="all"), unscored(2)).grad[gone] == 0).all()


def numbers(given: Given, seed: int) -> dict[str, float]:
    result = policy_loss(given.lp, METHODS["grpo"], given.advantages, given.batch_info, normalizer=1.0)
    tails = Tails()
    tails.add(given.lp)
    place = segments_of(draw(seed).turns, None).position
    shape = signature(given.lp, advantages=given.advantages, position=given.lp.like_caller(place))
    return result.stats.plus(shape).plus(tails.sums(lambda mine: [mine])).to_host()


@pytest.mark.parametrize("seed", range(4))
def test_no_statistic_sees_it_and_one_counts_it(seed):
    got, expected = numbers(unscored(seed), seed), numbers(without(seed), seed)
    assert got.pop("unscored") == int(lost(seed).sum())
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_metrics_say_how_many_there_are():
    counts = summarize(DriftStats.of(unscored(0).lp))
    gone = lost(0)
    assert counts["batch/unscored_tokens"] == int(gone.sum())
    assert counts["batch/unscored_frac"] == pytest.approx(float(gone.double().mean()))
    assert counts["batch/tokens"] == len(gone)
    clean = summarize(DriftStats.of(packed(draw(0)).lp))
    assert clean["batch/unscored_tokens"] == clean["batch/unscored_frac"] == 0


def test_one_in_a_thousand_changes_no_weight_and_no_verdict_of_the_others():
    """-9999 once gave its sequence the largest weight, and a drift of thousands of nats."""
    g = torch.Generator().manual_seed(0)
    mu = -3 * torch.rand(4000, generator=g)
    pi = (mu + 0.01 * torch.randn(4000, generator=g)).clamp(max=0).requires_grad_()
    given = Batch(tokens={}, rewards=torch.zeros(40), groups=torch.arange(40), turns=[[100]] * 40)
    segments = segments_of(given.turns, None)
    mu[1234] = -9999.0
    lp = LogProbs.pack(mu, pi, segments=segments)
    result = policy_loss(lp, METHODS["seq_tis"], torch.ones(4000))
    found = summarize(result.stats)
    assert result.corrected.weight.max() < 1.5
    assert found["full/abs_log_ratio_max"] < 0.1
    assert found["batch/unscored_tokens"] == 1
