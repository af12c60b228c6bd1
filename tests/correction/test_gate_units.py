"""Gates whose unit is a turn, or everything from the first token outside on; statistics of 2026."""

import math

import pytest
import torch

from offdrift.correction import Gate
from offdrift.correction.statistics import statistic
from offdrift.laws.batches import packed
from offdrift.methods import method
from tests.laws.handmade import made

L = [0.1, -3.0, 0.2, 0.1, 0.3, -2.9, -0.1]
LENGTHS = [4, 1, 2]


def kept(gate: Gate, a: list[float] | None = None, **how) -> list[bool]:
    batch = packed(made("full", L, a or [-1.0] * 7, lengths=None if "turns" in how else LENGTHS, **how))
    return gate.keep(batch.lp, batch.advantages, batch.batch_info).tolist()


def test_from_the_first_token_outside_all_fall_and_no_other_sequence_does():
    gate = Gate(statistic="ratio", on="full", unit="from_first", low=0.1)
    assert kept(gate) == [True, False, False, False, True, False, False]
    assert kept(gate, [1.0] * 7) == kept(gate)


def test_from_first_spares_tokens_of_the_other_sign():
    gate = Gate(statistic="ratio", on="full", unit="from_first", low=0.1, advantage="negative")
    assert kept(gate, [-1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0]) == [True, False, True, False, True, True, True]


def test_a_turn_is_judged_by_its_mean():
    """Means -1.45, 0.15, 0.3, -1.5: only the turns with the two that fell are out."""
    gate = Gate(statistic="ratio", on="full", unit="turn", low=math.exp(-1.4))
    turns = [[2, 2], [1], [2]]
    assert kept(gate, turns=turns) == [False, False, True, True, True, False, False]
    whole = Gate(statistic="ratio", on="full", unit="seq_mean", low=math.exp(-1.4))
    assert kept(Gate(statistic="ratio", on="full", unit="turn", low=math.exp(-1.4))) == kept(whole)


@pytest.mark.parametrize("name", ["binary_kl_forward", "binary_kl_reverse", "binary_kl_max"])
def test_binary_divergences_are_those_of_two_coins(name):
    p = torch.tensor([0.9, 0.5, 0.01, 1e-6, 1 - 1e-7], dtype=torch.float64)
    q = torch.tensor([0.5, 0.9, 0.2, 1e-3, 0.5], dtype=torch.float64)
    coins = torch.distributions.Bernoulli
    forward = torch.distributions.kl_divergence(coins(p), coins(q))
    reverse = torch.distributions.kl_divergence(coins(q), coins(p))
    expected = {"forward": forward, "reverse": reverse, "max": torch.maximum(forward, reverse)}[name[10:]]
    batch = made("full", (q.log() - p.log()).tolist(), [1.0] * 5).with_tokens(mu=p.log(), pi=q.log())
    torch.testing.assert_close(statistic(name, packed(batch).lp, on="full"), expected, rtol=1e-6, atol=0)


def areal(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """`compute_binary_kl_divergence` of AReaL, by its definition, in both directions."""
    p, q = (x.exp().clamp(1e-8, 1 - 1e-8) for x in (log_p, log_q))
    one, other = ((a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()) for a, b in ((p, q), (q, p)))
    return torch.maximum(one, other)


def test_kpop_drops_the_tokens_that_areal_drops():
    draw = torch.Generator().manual_seed(0)
    mu = -3 * torch.rand(400, generator=draw, dtype=torch.float64) ** 3
    old = (mu + 4 * torch.randn(400, generator=draw, dtype=torch.float64)).clamp(max=-1e-12)
    batch = made("mismatch", [0.0] * 400, [1.0] * 400).with_tokens(mu=mu, old=old)
    (gate,) = method("kpop").correction.gates
    keep = gate.keep(packed(batch).lp)
    assert torch.equal(keep, areal(old, mu) <= 2.0)
    assert 40 < int(keep.sum()) < 360


def test_certain_tokens_have_a_divergence_in_single_precision_too():
    """1 - 1e-8 is 1 in float32, where AReaL's formula is NaN."""
    sure = torch.tensor([-1e-12, -1e-3], dtype=torch.float32)
    batch = made("full", [0.0, 0.0], [1.0, 1.0])
    lp = packed(batch.with_tokens(mu=sure.double(), pi=sure.double().flip(0))).lp
    found = statistic("binary_kl_max", lp, on="full")
    assert found.isfinite().all()
    assert areal(sure, sure.flip(0)).isnan().any()


def nemo_rl(log_p: torch.Tensor, log_q: torch.Tensor, lengths: list[int]) -> list[bool]:
    """Keep a sequence iff the mean of exp(|difference|) over its tokens is at most 2."""
    error = (log_p - log_q).abs().exp()
    return [bool(x.mean() <= 2.0) for x in error.split(lengths) for _ in x]


def test_the_threshold_of_nemo_rl():
    lengths = [3, 5, 2, 7, 1, 4] * 10
    draw = torch.Generator().manual_seed(0)
    l = torch.randn(sum(lengths), generator=draw, dtype=torch.float64)  # noqa: E741
    lp = packed(made("mismatch", l.tolist(), [1.0] * len(l), lengths=lengths)).lp
    (gate,) = method("nemo_rl_threshold").correction.gates
    expected = nemo_rl(lp.old, lp.logp_rollout, lengths)
    assert gate.keep(lp).tolist() == expected
    assert 20 < sum(expected) < len(expected) - 20


def prime_rl(trainer: torch.Tensor, inference: torch.Tensor, a: torch.Tensor, name: str) -> torch.Tensor:
    """Sum of its `IPOLoss` (eps 0.3, weights up to 10,000) or `IcePopLoss` (0.2 to 5) of September 2026."""
    l = (trainer - inference).detach()  # noqa: E741
    moved = (trainer.exp() - inference.exp()).abs().detach()
    kept = moved <= 0.3 if name == "ipo" else (l >= math.log(0.2)) & (l <= math.log(5.0))
    weight = l.clamp(max=math.log(1e4)).exp() if name == "ipo" else l.exp()
    return -(kept * a * weight * (trainer - trainer.detach()).exp()).sum()


@pytest.mark.parametrize("name", ["ipo", "prime_rl_icepop"])
def test_losses_of_prime_rl_of_september(name):
    """Loss and gradient; IPO's differ where the ratio is above 10,000, by that quotient."""
    from offdrift.loss import policy_loss

    draw = torch.Generator().manual_seed(0)
    mu = -2 * torch.rand(60, generator=draw, dtype=torch.float64)
    pi = (mu + 1.2 * torch.randn(60, generator=draw, dtype=torch.float64)).clamp(max=-1e-3)
    mu[7], pi[7] = math.log(1e-6), math.log(0.2)
    batch = packed(made("full", [0.0] * 60, torch.randn(60, generator=draw).tolist()).with_tokens(mu=mu, pi=pi))
    ours, theirs = (pi.clone().requires_grad_() for _ in range(2))
    result = policy_loss(batch.lp.with_current(ours), method(name), batch.advantages, normalizer=1.0)
    result.loss.backward()
    their_loss = prime_rl(theirs, mu, batch.advantages, name)
    their_loss.backward()
    assert 5 < int((theirs.grad == 0).sum()) < 55
    if name == "ipo":
        assert float(ours.grad[7] / theirs.grad[7]) == pytest.approx(20)
        excess = (ours.grad - theirs.grad)[7].clone()
        ours.grad[7], their_loss = theirs.grad[7], their_loss.detach() + excess
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(result.loss.detach(), their_loss.detach())
