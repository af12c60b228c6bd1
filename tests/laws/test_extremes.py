"""Everything rejected, policies e^10000 apart, one token: numbers stay numbers."""

from dataclasses import replace

import pytest
import torch

from offdrift.laws.batches import Run, draw, packed, run
from offdrift.laws.laws import NOTHING_PASSES, far_apart
from offdrift.methods import METHODS
from tests.laws.definitions import anchored, sequences_of, untouched
from tests.laws.rows import ROWS

every_row = pytest.mark.parametrize("name", METHODS)
every_row_and_variant = pytest.mark.parametrize("name", ROWS)


@every_row
def test_rejecting_everything_leaves_a_zero_with_a_graph(name):
    """Only terms that gates do not touch remain, and with gate_scope="all" not those either."""
    row, batch = METHODS[name], draw(0)
    shut = replace(row, correction=row.correction & NOTHING_PASSES)
    got = run(shut, packed(batch))
    assert got.result.loss.requires_grad
    assert not got.keep.any()
    left = untouched(row, anchored(row, sequences_of(batch)))
    torch.testing.assert_close(got.grad, left, rtol=1e-9, atol=1e-15)
    assert bool((left != 0).any()) == bool(got.loss != 0)
    check_finite(got)
    nothing = run(replace(shut, gate_scope="all"), packed(batch))
    assert nothing.result.loss.requires_grad
    assert nothing.loss == 0
    assert (nothing.grad == 0).all()
    assert nothing.grad.numel() > 20


def check_finite(got: Run) -> None:
    stats = got.result.stats
    assert got.loss.isfinite()
    assert got.grad.isfinite().all()
    assert stats.sums.isfinite().all()
    assert stats.maxima.isfinite().all()
    assert not (stats.logs.isnan() | (stats.logs == torch.inf)).any()
    assert got.result.corrected.weight.isfinite().all()
    for seen in got.result.observed.parts.values():
        for name, x in seen.items():
            if name == "key" or name.startswith("log_"):
                assert not x.isnan().any(), name  # inf marks what may not be chosen; log 0 is -inf
            else:
                assert x.isfinite().all(), name


@every_row_and_variant
def test_log_ratios_of_ten_thousand_stay_finite(name):
    """In this step and, where a method adapts, in the next."""
    for dtype in (torch.float32, torch.float64):
        for sign in (1.0, -1.0):
            given = far_apart(draw(2), sign, dtype)
            got = run(ROWS[name], given)
            check_finite(got)
            assert got.grad.dtype == dtype
            following = ROWS[name].next(got.result.observed)
            if following != ROWS[name]:
                check_finite(run(following, given))


@every_row
def test_impossible_tokens_stay_finite(name):
    """-inf is a legal log-prob: a token that a policy cannot draw."""
    batch = draw(2)
    columns = {k: batch.tokens[k].clone() for k in ("mu", "old", "pi", "ref")}
    for i, x in enumerate(columns.values()):
        x[i::5] = -torch.inf
    check_finite(run(METHODS[name], packed(batch.with_tokens(**columns))))


@every_row
def test_one_token_is_a_batch(name):
    batch = draw(1)
    shortest = min(range(8), key=lambda i: batch.lengths[i])
    one = batch.chosen([shortest])
    check_finite(run(METHODS[name], packed(one)))


@every_row_and_variant
def test_without_advantage_there_is_no_push(name):
    """A = 0: no loss, no gradient, nothing clipped; only terms without advantage remain."""
    row, batch = ROWS[name], draw(3)
    got = run(row, packed(batch.with_tokens(a=torch.zeros_like(batch.tokens["a"]))))
    if name.split(",")[0] in WITHOUT_ADVANTAGE:
        assert (got.grad != 0).any()
        return
    left = untouched(row, anchored(row, sequences_of(batch)))
    torch.testing.assert_close(got.grad, left, rtol=1e-9, atol=1e-15)
    assert got.result.stats.to_host().get("objective/clipped", 0) == 0


WITHOUT_ADVANTAGE = {
    "oapl": "regresses on rewards",
    "online_dpo": "compares rewards",
    "dro": "the pull to the old policy remains",
    "quatro": "the pull to the old policy remains",
    "kl_cov": "a chosen token carries its penalty alone",
    "kl_cov_exact": "a chosen token carries its penalty alone",
    "troll": "the pull to the projected policy remains",
}
"""Their gradient at A = 0 is asserted by formula in `test_limits`, on tokens without advantage."""
