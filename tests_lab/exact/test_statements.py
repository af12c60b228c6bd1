"""The statements of docs/certificates.md beyond Table 1, by enumeration: none is violated, wrong ones are."""

import pytest
import torch

from offdrift.certificate.bounds import HELLINGER
from offdrift_lab.exact.pairs import FAMILIES
from offdrift_lab.exact.policy import TabularPolicy, weights_by_sequence
from offdrift_lab.exact.statements import LABELS, STATEMENTS, all_sides, hellinger_sum

TREES = [(2, 2), (2, 4), (3, 3), (2, 7), (4, 3)]
ROUNDING = 1e-11

EXPECTED = {
    "masked surrogate, no premise": 0.5,
    "variance along sequences": 0.999,
    "variance from the largest chi-squared": 0.999,
    "two-sided identity: upper end, E[R k3(w)]": 0.9,
    "two-sided identity: upper end, E[(1-R) sum k3(w_t)]": 0.999,
    "two-sided identity: lower end, E[R sum k3(w_t)]": 0.999,
    "two-sided identity: lower end, E[(1-R) k3(w)]": 0.9,
    "two-sided identity: worst case over R": 0.999,
    "trained objectives: clipped surrogate": 0.5,
    "trained objectives: truncated weights": 0.5,
    "trained objectives: no weights": 0.4999,  # 1/2 in the limit of small drift
    "trained objectives: truncated weights, no baseline": 0.5,
    "weighted objectives: clipped surrogate": 0.9,
    "weighted objectives: truncated weights": 0.9,
    "weighted objectives: no weights": 0.9,
    "Hellinger": 2.0 / HELLINGER,
}
"""A share of each bound that some pair reaches, so that a smaller constant would be refuted."""


@pytest.fixture(scope="module")
def sides():
    """Both sides of every statement over all kinds of pairs."""
    g = torch.Generator().manual_seed(0)
    outcomes: dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
    for family, make in FAMILIES.items():
        for vocab, horizon in TREES:
            mu, pi = make(60, vocab, horizon, g)
            for name, s in all_sides(mu, pi).items():
                outcomes.setdefault(name, []).append((family, s.value[s.applies], s.bound[s.applies]))
    return outcomes


def test_every_statement_has_an_expected_share(sides):
    assert list(sides) == list(EXPECTED) == list(LABELS)
    assert max(map(len, LABELS.values())) <= 24  # a table of 80 columns holds them
    assert len(set(LABELS.values())) == len(LABELS)
    assert {name.partition(":")[0] for name in sides} == STATEMENTS.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_no_pair_and_reward_violates_it_and_some_come_close(sides, name):
    reached = 0.0
    for family, value, bound in sides[name]:
        assert not (value + bound).isnan().any(), family
        assert bool((value <= bound * (1 + 1e-9) + ROUNDING).all()), family
        shares = ((value - ROUNDING) / bound).nan_to_num(0.0)[bound > 1e-9]
        reached = max(reached, *shares.tolist(), 0.0)
    assert reached >= EXPECTED[name]


def _stopped(mu: TabularPolicy, pi: TabularPolicy):
    """The stopped process of the proof of the Hellinger bound, of every sequence."""
    law = sigma = mu.levels[0].new_ones(mu.pairs, 1)
    out = torch.zeros_like(law, dtype=torch.bool)  # sigma has exceeded 2
    peak = change = drift = torch.zeros_like(law)
    for m, p in zip(mu.levels, pi.levels, strict=True):
        h = ((p.sqrt() - m.sqrt()).square().sum(-1) / 2)[..., None].expand_as(m)
        s = torch.where(m > 0, (p / m.where(m > 0, 1.0)).sqrt(), 1.0)
        going = ~out[..., None]
        n = s - 1 + h
        peak = torch.maximum(peak, torch.where(out, 0.0, (sigma - 1).abs()))
        step = torch.where(going, sigma[..., None] - 1, 0.0) * n
        change = (change[..., None] + step).flatten(1)
        drift = (drift[..., None] + torch.where(going, sigma[..., None] * h, 0.0)).flatten(1)
        now = torch.where(going, sigma[..., None] * s, sigma[..., None])
        peak = peak.repeat_interleave(mu.vocab, dim=1)
        out = (out[..., None] | (now > 2)).flatten(1)
        sigma, law = now.flatten(1), (law[..., None] * m).flatten(1)
    return law, sigma, out, peak, change, drift


@pytest.mark.parametrize("family", FAMILIES)
def test_each_step_of_the_proof_of_the_hellinger_bound(family):
    g = torch.Generator().manual_seed(1)
    for vocab, horizon in TREES:
        mu, pi = FAMILIES[family](60, vocab, horizon, g)
        law, sigma, out, peak, change, drift = _stopped(mu, pi)
        total = hellinger_sum(mu, pi)

        def mean(x, law=law):
            return (law * x).sum(1)

        square, missed = mean((sigma - 1).square()), 1 - mean(sigma.square())
        worst = {
            "E[(sigma - 1)^2] + missed = 2 (1 - E sigma)": ((square + missed) - 2 * (1 - mean(sigma))).abs(),
            "that is at most 4 S": square + missed - 4 * total,
            "E A = 1 - E sigma": (mean(drift) - (1 - mean(sigma))).abs(),
            "E A^2 <= 8 S": mean(drift.square()) - 8 * total,
            "pi exits with probability at most 16 S": mean(sigma.square() * out) - 16 * total,
            "mu exits with probability at most 4 S": mean(out.double()) - 4 * total,
            "E max (sigma - 1)^2 <= 72 S": mean(peak.square()) - 72 * total,
            "|E R N'| <= 6 S": mean(change.clamp(min=0)) - 6 * total,  # R = 1 where N' > 0 is the worst
        }
        for step, excess in worst.items():
            assert float(excess.max()) <= ROUNDING, (step, vocab, horizon)


def test_two_tokens_already_need_a_hellinger_constant_of_two_root_two():
    """A rare branch that pi takes nine times as often, and in which it swaps two tokens."""
    rare, q = 1e-7, (1 - 8**0.5 / 3) / 2
    half, swapped = [0.5, 0.5], [1 - q, q]

    def policy(branch: float, tokens: list[float]) -> TabularPolicy:
        rows = [[[[1 - branch, branch]]], [[half, tokens]]]
        return TabularPolicy(tuple(torch.tensor(level, dtype=torch.float64) for level in rows))

    mu, pi = policy(rare, swapped), policy(9 * rare, swapped[::-1])
    error = weights_by_sequence(mu, pi)[1].clamp(min=0).sum()
    assert float(error / hellinger_sum(mu, pi)) == pytest.approx(8**0.5, rel=1e-5)
