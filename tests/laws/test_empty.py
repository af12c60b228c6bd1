"""A batch all of whose tokens are masked, or unscored: zero loss with a graph, in every row."""

import functools
import math

import pytest
import torch
from torch import Tensor

from offdrift.adapters.base import Adapter
from offdrift.batch_info import BatchInfo, Observed
from offdrift.divergence.evidence import Distributions, Divergence
from offdrift.laws.batches import DIVERGENCES, VOCAB, Given, draw, packed, run, seen
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from offdrift.segments import Segments
from offdrift.stats import DriftStats, summarize

every_row = pytest.mark.parametrize("name", METHODS)


def masked_out() -> Given:
    leaf = torch.full((3, 4), math.nan, dtype=torch.float64, requires_grad=True)
    x = leaf.detach()
    lp = LogProbs.pack(x, leaf, x, logp_ref=x, mask=torch.zeros(3, 4), group_ids=torch.tensor([91, 91, 92]))
    return _given(lp, leaf, torch.zeros(0, dtype=torch.float64))


def all_unscored() -> Given:
    leaf = -torch.rand(5, dtype=torch.float64)
    leaf.requires_grad_()
    x = leaf.detach() - 0.5
    gone = torch.full_like(x, -9999.0)
    segments = Segments.from_lengths([2, 3], group_ids=torch.tensor([1, 1]))
    lp = LogProbs.pack(gone, leaf, x, logp_ref=leaf.detach(), segments=segments)
    return _given(lp, leaf, torch.ones(5, dtype=torch.float64))


def _given(lp: LogProbs, leaf: Tensor, ones: Tensor) -> Given:
    exact = dict.fromkeys(DIVERGENCES, ones) | {"kl_old_current": (lp.current - lp.old).square()}
    batch_info = BatchInfo(
        divergences={k: Divergence.exact(k, x) for k, x in exact.items()},
        entropy=ones,
        vocab=VOCAB,
        rewards=torch.zeros(len(lp.segments), dtype=torch.float64),
        version_lag=ones,
        distributions=Distributions.of_two(lp.old, lp.current),
    )
    return Given(lp=lp, leaf=leaf, advantages=ones, batch_info=batch_info)


@every_row
@pytest.mark.parametrize("make", [masked_out, all_unscored])
@pytest.mark.parametrize("normalizer", [None, 7.0])
def test_the_loss_is_zero_and_so_is_its_gradient(name, make, normalizer):
    got = run(METHODS[name], make(), normalizer=normalizer, horizon=12)
    assert got.loss == 0
    assert (got.grad == 0).all()
    assert got.result.loss.requires_grad
    found = summarize(got.result.stats)
    assert not any(abs(x) == math.inf for x in found.values()), found
    assert found["batch/tokens"] in (0, 5)


@every_row
def test_it_adds_nothing_to_a_step(name):
    row, batch, none = METHODS[name], packed(draw(2)), masked_out()
    observed = functools.reduce(Observed.merge, [seen(row, none), seen(row, batch)])
    alone = run(row, batch)
    beside = run(row, batch, observed=observed)
    torch.testing.assert_close(beside.loss, alone.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(beside.grad, alone.grad, rtol=1e-12, atol=1e-12)
    empty = run(row, none, observed=observed)
    assert (empty.grad == 0).all()
    merged = empty.result.stats.merge(beside.result.stats).to_host()
    assert merged == pytest.approx(alone.result.stats.to_host(), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("make", [masked_out, all_unscored])
def test_an_adapter_takes_it_and_waits_for_tokens(make):
    adapter = Adapter("token_tis", framework="plain", metrics="all")
    given = make()
    assert adapter.loss(given.lp, given.advantages).loss == 0
    assert adapter.end_step(1)["offdrift/batch/tokens"] == len(given.advantages)
    given = packed(draw(0))
    adapter.loss(given.lp, given.advantages)
    assert adapter.end_step(2)["offdrift/full/k3"] > 0
    decided = Adapter("token_tis", framework="plain").correct(make().lp)
    assert not decided.keep.any()


def test_statistics_alone_are_total():
    assert DriftStats.of(masked_out().lp).to_host()["n"] == 0


def test_a_batch_of_no_sequences_is_still_refused():
    with pytest.raises(ValueError, match="empty batch: 0 sequences"):
        LogProbs.pack(torch.zeros(0, 3), mask=torch.zeros(0, 3))


def test_in_a_users_own_loop():
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    lp = LogProbs.pack(logp.detach(), logp, mask=torch.zeros(2, 3))
    result = policy_loss(lp, "token_tis", lp.like_caller(torch.ones(2, 3)), normalizer=6.0)
    result.loss.backward()
    assert logp.grad.tolist() == [[0.0] * 3] * 2
