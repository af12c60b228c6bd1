"""Ratios and units on FX-A; expected numbers are the methods table's, six printed digits."""

import pytest
import torch

from offdrift.errors import EvidenceError
from offdrift.logprobs import LogProbs
from offdrift.numerics import ratio, shared_ratios
from offdrift.ratios import log_ratio, per_unit, worst
from offdrift.segments import Segments
from tests.oracles.fixtures import MASK, double, fx_a

# unit.* of the methods table: per sequence, exponentiated
SEQUENCE = {"mismatch": [0.637628, 0.755784], "staleness": [1.221403, 1.072508], "full": [0.778801, 0.810584]}
GEOMETRIC = {"mismatch": [0.893597, 0.91089], "staleness": [1.051271, 1.023608], "full": [0.939413, 0.932394]}
WORST = {"mismatch": [0.9, 0.3], "staleness": [0.3, 0.2], "full": [0.8, 0.28]}
FULL_TOKEN = [[1.161834, 1.284025, 1.161834, 0.449329], [0.878095, 1.221403, 0.755784, 0.0]]


def close(got, expected):
    torch.testing.assert_close(got.detach(), double(expected), rtol=0, atol=1e-6)


def test_token_ratio_in_the_callers_shape():
    lp, _, _ = fx_a()
    close(lp.unpack(ratio(log_ratio(lp, on="full"))), FULL_TOKEN)


def test_full_is_mismatch_plus_staleness():
    lp, _, _ = fx_a()
    both = log_ratio(lp, on="mismatch") + log_ratio(lp, on="staleness")
    torch.testing.assert_close(log_ratio(lp, on="full"), both, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("on", ["mismatch", "staleness", "full"])
@pytest.mark.parametrize(("unit", "table"), [("sequence", SEQUENCE), ("geometric", GEOMETRIC)])
def test_sequence_units_match_the_methods_table(on, unit, table):
    lp, _, _ = fx_a()
    got = lp.unpack(ratio(per_unit(log_ratio(lp, on=on), lp.segments, unit=unit)))
    close(got, (double([[v] * 4 for v in table[on]]) * MASK).tolist())


@pytest.mark.parametrize("on", ["mismatch", "staleness", "full"])
def test_worst_is_the_largest_absolute_log_ratio_with_its_sign(on):
    lp, _, _ = fx_a()
    l = log_ratio(lp, on=on)  # noqa: E741
    got = worst(l, lp.segments)
    close(got.abs(), WORST[on])
    assert all(v in l.tolist() for v in got.tolist())


def test_where_gradient_flows():
    lp, _, leaf = fx_a()
    assert not log_ratio(lp, on="mismatch").requires_grad
    per_unit(log_ratio(lp, on="full"), lp.segments, unit="geometric").sum().backward()
    # each token of a sequence of length T receives T * (1 / T)
    close(leaf.grad, [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.0]])


def test_a_log_ratio_of_ten_thousand_is_a_finite_number_without_gradient():
    x = torch.tensor([1e4, -1e4, 20.0], requires_grad=True)
    y = ratio(x)
    y.sum().backward()
    assert y.tolist() == pytest.approx([4.851652e8, 2.061154e-9, 4.851652e8], rel=1e-5)
    assert x.grad[:2].tolist() == [0.0, 0.0]


def test_missing_policies_and_unknown_names_are_refused():
    lp = LogProbs.pack(torch.tensor([-1.0]), segments=Segments.from_lengths([1]))
    with pytest.raises(EvidenceError, match="logp_old"):
        log_ratio(lp, on="mismatch")
    # beartype would refuse these names too; users do not run it
    with pytest.raises(Exception, match="old"):
        log_ratio(lp, on="old")  # type: ignore[arg-type]
    with pytest.raises(Exception, match="batch"):
        per_unit(torch.zeros(1), lp.segments, unit="batch")  # type: ignore[arg-type]


def test_methods_that_share_a_batch_share_its_ratios_and_a_gradient_is_never_shared():
    lp, _, leaf = fx_a()
    alone = log_ratio(lp, on="full")
    with shared_ratios():
        assert log_ratio(lp, on="full") is not log_ratio(lp, on="full")  # each with a graph of its own
        with torch.no_grad():
            shared = log_ratio(lp, on="full")
            assert torch.equal(shared, alone)
            assert shared is log_ratio(lp, on="full")
            assert ratio(shared) is ratio(shared)
            assert torch.equal(ratio(shared), ratio(alone))
        ratio(log_ratio(lp, on="full")).sum().backward()
    assert leaf.grad.count_nonzero() == leaf.grad.numel() - 1  # all but the masked one
    with torch.no_grad():
        assert ratio(log_ratio(lp, on="full")) is not ratio(log_ratio(lp, on="full"))
