"""MIPU's first step: GRPO's dual clip on staleness, each token times its truncated mismatch."""

import math

import pytest
import torch

from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.segments import Segments


def test_by_hand():
    """Two answers of one and two tokens. w = e^.5, e^1 (cut to 2), 1; r = e^.1, 1, e^.5; A = 1, -1, -1."""
    segments = Segments.from_lengths([1, 2])
    rollout = torch.tensor([-2.0, -2.0, -1.0], dtype=torch.float64)
    old = rollout + torch.tensor([0.5, 1.0, 0.0])
    logp = (old + torch.tensor([0.1, 0.0, 0.5])).requires_grad_()
    logprobs = LogProbs.pack(rollout, logp, old, segments=segments)
    loss = policy_loss(logprobs, "mipu", torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)).loss
    w, r = (math.exp(0.5), 2.0, 1.0), (math.exp(0.1), 1.0, math.exp(0.5))
    by_hand = -w[0] * r[0] / 2 + (w[1] * r[1] + w[2] * r[2]) / 4  # mean over each answer, mean over both
    assert loss.item() == pytest.approx(by_hand, abs=1e-8)
    loss.backward()
    assert logp.grad is not None
    expected = [-w[0] * r[0] / 2, w[1] * r[1] / 4, w[2] * r[2] / 4]
    torch.testing.assert_close(logp.grad, torch.tensor(expected, dtype=torch.float64))
