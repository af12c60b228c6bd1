"""ESPO: values of the methods table, an oracle in plain loops, ranking, and the laws."""

import math

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.objectives.clipped import Clipped
from offdrift.objectives.entropy_groups import EntropyGrouped, entropy_groups, most_uncertain
from offdrift.ratios import log_ratio
from offdrift.segments import Segments
from tests.objectives.checks import check_golden, check_loss_and_gradient
from tests.oracles.fixtures import double, fx_a, ragged

H = double([0.2, 2.5, 0.4, 3.0, 0.1, 0.3, 2.0])


def batch_info_of(lp: LogProbs, seed: int, *, scale: float = 7.0) -> BatchInfo:
    g = torch.Generator().manual_seed(seed)
    entropy = scale * torch.rand(lp.segments.num_tokens, generator=g, dtype=torch.float64)
    return BatchInfo(entropy=entropy, vocab=1000)


def test_values_of_the_methods_table():
    lp, a, _ = fx_a()
    batch_info = BatchInfo(entropy=H, vocab=1000)
    check_golden(
        EntropyGrouped(top_frac=0.5), (lp, a), "seq_mean_token_mean", loss=-0.213701, batch_info=batch_info,
        grad=[[-0.113105, 0, -0.113105, 0], [0, 0.06976738, 0.06976738, 0]],
    )  # fmt: skip
    top = most_uncertain(H, lp.segments, fraction=0.5)
    assert top.tolist() == [False, True, False, True, False, True, True]
    l = log_ratio(lp, on="staleness").detach()  # noqa: E741
    mean, mean_entropy, share = entropy_groups(l, H, top, lp.segments)
    s = [0.904837, 1.221403, 0.904837, 1.221403, 0.860708, 1.116278, 1.116278]
    assert mean.exp().tolist() == pytest.approx(s, abs=1e-6)
    eps = [0.00086859, 0.00796207, 0.00086859, 0.00796207, 0.00028953, 0.00332959, 0.00332959]
    assert (0.02 / math.log(1000) * mean_entropy).tolist() == pytest.approx(eps, abs=1e-8)
    # 4 / (2 groups * 2); 3 / (2 * 1) and 3 / (2 * 2)
    assert share.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0, 1.5, 0.75, 0.75])


@pytest.mark.parametrize(
    ("fraction", "length", "number"), [(0.2, 1, 1), (0.2, 5, 1), (0.2, 6, 2), (0.5, 3, 2), (0.07, 100, 7), (1.0, 4, 4)]
)
def test_the_number_of_top_tokens_is_rounded_up(fraction, length, number):
    g = torch.Generator().manual_seed(length)
    entropy = torch.rand(length, generator=g)
    top = most_uncertain(entropy, Segments.from_lengths([length]), fraction=fraction)
    assert int(top.sum()) == number
    assert top[entropy.sort(descending=True).indices[:number]].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranking_ends_at_sequences_and_ties_go_to_the_earlier_token(dtype):
    # An empty sequence; huge entropies next door; equal, zero, negative-zero and tiny entropies.
    s = Segments.from_lengths([0, 3, 4, 2, 3])
    entropy = torch.tensor([9.0, 9.0, 1e30, 1.0, 2.0, 2.0, 1.0, -0.0, 0.0, 1e-30, 2e-30, 0.0], dtype=dtype)
    top = most_uncertain(entropy, s, fraction=0.5)
    assert top.int().tolist() == [1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 0]


def test_a_sequence_of_one_token_is_ppo_with_the_width_of_its_entropy():
    lp = LogProbs.pack(
        double([-1.0, -1.0]), double([-0.9, -1.2]).requires_grad_(), double([-1.0, -1.0]),
        segments=Segments.from_lengths([1, 1]),
    )  # fmt: skip
    a = double([1.0, -1.0])
    batch_info = BatchInfo(entropy=double([math.log(10)] * 2), vocab=100)  # half of ln(100)
    got = EntropyGrouped(alpha=0.2)(lp, a, batch_info)
    check_loss_and_gradient(lp, got.loss, Clipped(eps_low=0.1, eps_high=0.1)(lp, a).loss)


def test_entropy_zero_clips_any_outward_drift_and_none_on_policy():
    old = double([-1.0, -1.0, -1.0])
    leaf = (old + double([1e-9, -1e-9, 0.0])).requires_grad_()
    lp = LogProbs.pack(old, leaf, old, segments=Segments.from_lengths([1, 1, 1]))
    got = EntropyGrouped()(lp, torch.ones_like(old), BatchInfo(entropy=torch.zeros_like(old), vocab=9))
    assert got.clipped.tolist() == [True, False, False]


def test_the_shares_of_a_sequence_add_up_to_its_length():
    """Its total push is that of the other methods."""
    lp = ragged(8)
    zeros = torch.zeros(lp.segments.num_tokens, dtype=torch.float64)
    top = most_uncertain(batch_info_of(lp, 8).required("entropy"), lp.segments, fraction=0.2)
    share = entropy_groups(zeros, zeros, top, lp.segments)[2]
    torch.testing.assert_close(lp.segments.sum(share), lp.segments.lengths.double())
