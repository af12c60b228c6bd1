"""REAL: two logistic losses over the answers to a prompt, against ms-swift's formula differentiated as it stands."""

import pytest
import torch

from offdrift.errors import EvidenceError
from offdrift.laws.batches import draw, packed, run
from offdrift.loss import policy_loss
from offdrift.methods import method
from offdrift.objectives.preference import Classified

LENGTHS, GROUPS = [2, 3, 1, 4, 2, 2], [0, 0, 0, 1, 1, 1]
ADVANTAGES = [1.0, -1.0, 0.5, -0.2, -0.3, 0.9]


def ms_swift(log_ratio: torch.Tensor, advantages: list[float], *, tau: float = 0.5) -> torch.Tensor:
    """Sum over prompts with both classes of its two losses, over the number of prompts."""
    scores = torch.stack([x.mean() for x in log_ratio.split(LENGTHS)]).view(2, 3) / tau
    positive = torch.tensor(advantages).view(2, 3) > 0
    zero, total = torch.zeros(1, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for s, p in zip(scores, positive, strict=True):
        if p.any() and not p.all():
            total = total + torch.logsumexp(torch.cat([s[~p], zero]), 0) + torch.logsumexp(torch.cat([-s[p], zero]), 0)
    return total / 2


def batch_of(log_ratio: torch.Tensor, advantages: list[float]):
    from offdrift.logprobs import LogProbs
    from offdrift.segments import Segments

    segments = Segments.from_lengths(LENGTHS, group_ids=torch.tensor(GROUPS))
    old = torch.full_like(log_ratio, -2.0).detach()
    logprobs = LogProbs(old - 0.1, segments, old + log_ratio, old)
    return logprobs, segments.spread(torch.tensor(advantages, dtype=torch.float64))


@pytest.mark.parametrize("advantages", [ADVANTAGES, [-1.0, -1.0, -0.5, -0.2, 0.3, 0.9]])
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_loss_and_gradient_are_those_of_ms_swift(advantages, scale):
    noise = torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, y = ((scale * noise).requires_grad_() for _ in range(2))
    ours = policy_loss(*batch_of(x, advantages)[:1], method("real"), batch_of(x, advantages)[1]).loss
    theirs = ms_swift(y, advantages)
    ours.backward()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-14)
    assert theirs.item() > 0
    assert int((x.grad != 0).sum()) == (14 if advantages is ADVANTAGES else 8)


def test_an_answer_that_is_on_its_side_is_hardly_pushed():
    pushes = []
    for x in (-3.0, 0.0, 3.0):
        l = torch.zeros(sum(LENGTHS), dtype=torch.float64)  # noqa: E741
        l[:2] = x
        l.requires_grad_()
        logprobs, a = batch_of(l, ADVANTAGES)
        policy_loss(logprobs, method("real"), a).loss.backward()
        pushes.append(-float(l.grad[0]))
    assert pushes[0] > pushes[1] > pushes[2] > 0
    assert pushes[2] < pushes[0] / 100


def test_only_the_sign_of_the_advantage_counts_and_ratios_far_out_stay_finite():
    given = draw(3)
    once, twice = (run(method("real"), packed(given.with_tokens(a=s * given.tokens["a"]))) for s in (1.0, 7.0))
    torch.testing.assert_close(once.grad, twice.grad)
    far = torch.full((sum(LENGTHS),), 500.0, dtype=torch.float64, requires_grad=True)
    logprobs, a = batch_of(far, ADVANTAGES)
    loss = policy_loss(logprobs, method("real"), a).loss
    loss.backward()
    assert loss.isfinite()
    assert far.grad.isfinite().all()


def test_a_batch_without_prompts_is_refused():
    from dataclasses import replace

    logprobs, a = batch_of(torch.zeros(sum(LENGTHS), dtype=torch.float64), ADVANTAGES)
    alone = replace(logprobs, segments=replace(logprobs.segments, group_ids=None))
    with pytest.raises(EvidenceError, match="group_ids"):
        Classified()(alone, a)
