"""Two losses are told apart by value, by gradient alone, and by what is not a number."""

import logging
import math

import pytest
import torch
from torch import Tensor

from offdrift.adapters import proof
from offdrift.errors import FrameworkError, MethodError

AT = torch.linspace(-2.0, -0.1, 12).double().view(3, 4)
LOG = logging.getLogger("offdrift.verl")


def own(x: Tensor) -> Tensor:
    return x.exp().square().sum()


CASES = {
    "itself": (own, 0.0, 0.0),
    "another value": (lambda x: own(x) * 1.001, 1e-3, 1e-3),
    "another gradient of the same value": (lambda x: own(x).detach() + 0 * x.sum(), 0.0, 1.0),
    "a gradient of one token": (lambda x: own(x) - x[0, 0] + x[0, 0].detach(), 0.0, 1.0),
    "nothing": (lambda x: own(x) * math.nan, math.inf, math.inf),
    "one of each token": (lambda x: x.exp().square(), math.inf, math.inf),
}


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_decide(case: str) -> None:
    ours, loss, gradient = CASES[case]
    found = proof.differences(own, ours, AT)
    for x, expected in zip(found, (loss, gradient), strict=True):
        assert x == expected or (0.1 * expected < x < 10 * expected)
    if case == "itself":
        proof.prove(LOG, "verl", "their_loss", native=own, ours=ours, at=AT)
        return
    with pytest.raises(FrameworkError, match="verl: their_loss is a loss that this adapter does not know"):
        proof.prove(LOG, "verl", "their_loss", native=own, ours=ours, at=AT)


def test_what_cannot_be_called_is_said_and_errors_of_ours_stay(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "offdrift.verl"):
        proof.prove(LOG, "verl", "their_loss", native=None, ours=own, at=AT)
    assert "their_loss is not" in caplog.text

    def fails(x: Tensor) -> Tensor:
        raise MethodError("ours")

    with pytest.raises(MethodError, match="ours"):
        proof.prove(LOG, "verl", "their_loss", native=own, ours=fails, at=AT)
    with pytest.raises(FrameworkError, match="it ends with KeyError"):
        proof.prove(LOG, "verl", "their_loss", native=lambda x: {}["x"], ours=own, at=AT)


def test_the_sample_tells_the_policies_of_an_on_policy_batch_apart() -> None:
    logp, mask = torch.full((4, 25), -0.7), torch.rand(4, 25, generator=torch.Generator().manual_seed(0)) > 0.3
    bad = logp.where(mask, torch.nan)
    rollout = bad.clone()
    rollout[0, :5] = -9999.0
    s = proof.sample_of(bad, bad, rollout, advantages=torch.zeros(4, 25), mask=mask)
    columns = (s.logp, s.old, s.rollout)
    assert all(x.dtype is torch.float64 and bool(x.isfinite().all()) and bool((x <= 0).all()) for x in columns)
    assert {1.0, -1.0} == set(s.advantages.unique().tolist())
    ratio = (s.logp - s.old).exp()[mask]
    assert float(ratio.min()) < 0.8
    assert float(ratio.max()) > 1.28
    assert float((s.old - s.rollout).abs().max()) < 2
    assert len((s.old - s.rollout)[mask].unique()) > 50
