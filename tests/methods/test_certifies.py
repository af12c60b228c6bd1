"""Which rows carry a certificate: read off their parts, and checked by enumeration of sequences."""

import math
from itertools import product

import pytest
import torch

from offdrift.methods import method, override
from offdrift.methods.describe import CERTIFIES, certifies
from offdrift.methods.probe import STEPS, WIDEST, integrated_push, token_push
from offdrift.methods.table import METHODS
from offdrift_lab.exact.pairs import FAMILIES
from offdrift_lab.exact.policy import TabularPolicy, divergences
from offdrift_lab.exact.statements import full_support, mean, products, token_sum


@pytest.mark.parametrize("name", METHODS)
def test_every_row_says_what_it_certifies(name):
    assert certifies(method(name)) in CERTIFIES


def test_known_rows():
    known = {
        "none": "no mismatch",  # A log w: the EM bound, with a baseline
        "token_is": "any mismatch",  # A (w - 1): the surrogate itself
        "token_tis": "no mismatch",
        "ppo_clip": "no mismatch",
        "grpo": "no mismatch",
        "dual_clip": "no baseline",  # with b near 1 a wrong answer is overstated beyond the second clip
        "trm_max": "region",
        "gspo": "none known",
        "kl_cov": "none known",
        "troll": "none known",  # a ratio of the projected policy, which is no function of the drawn token's
    }
    assert {name: certifies(method(name)) for name in known} == known


def test_the_push_of_the_plain_surrogate_integrates_to_it():
    log_s = torch.linspace(-WIDEST, WIDEST, 2 * STEPS + 1, dtype=torch.float64)
    for m in (0.5, 1.0, 3.0):
        phi = integrated_push(method("token_is"), -0.7, m, correct=True)
        torch.testing.assert_close(phi, -0.7 * m * log_s.expm1(), rtol=1e-4, atol=1e-6)


CLAIMS = {
    "any mismatch": ((0.0, 0.3, 1.0), (1.0, 0.1, 0.9, 3.0)),
    "no mismatch": ((0.0, 0.3, 1.0), (1.0,)),
    "no baseline": ((0.0,), (1.0,)),
}
"""Baselines and mismatches that a row's word is about."""


def claiming(*words: str) -> list[str]:
    """Names of the rows with one of these words; asked for in tests alone, since to know all takes seconds."""
    return [name for name, row in METHODS.items() if certifies(row) in words]


@pytest.mark.parametrize("word", CLAIMS)
def test_the_slopes_at_equal_policies_are_those_that_the_statement_allows(word):
    """At s = 1 both sides of the inequality are 0 (a right answer, or no mismatch), so slopes decide beside it."""
    baselines, mismatches = CLAIMS[word]
    beside = torch.tensor([-1e-9, 1e-9], dtype=torch.float64)
    cases = [(1.0, m) for m in mismatches] + [(0.0, 1.0), (0.5, 1.0)]
    for name, b, (reward, m) in product(claiming(word), baselines, cases):
        below, above = token_push(method(name), reward - b, m, correct=reward > 0, log_s=beside).tolist()
        assert above <= (reward - b) * m + 1e-6, (name, b, reward, m)
        assert below >= (reward - b) * m - 1e-6, (name, b, reward, m)


def test_a_weight_below_1_at_equal_policies_certifies_nothing():
    """V = log((w + g) / (1 + g)) is above w - 1 for w in (.82, 1) at g = .1: too flat a slope, however little."""
    assert certifies(method("shaped_is")) == "none known"
    for saturation in (0.1, 1e-2, 1e-3):
        assert certifies(override(method("shaped_is"), {"weight.saturation": saturation})) == "none known"
    v = (torch.tensor(0.9).double() + 0.1).log() - math.log(1.1)
    assert v > 0.9 - 1


def overstated(name: str, mu: TabularPolicy, pi: TabularPolicy, baseline: float) -> float:
    """The most by which a row's summed objective exceeds gain + KL_seq, over pairs and rewards 0 or 1."""
    log_w = torch.linspace(-WIDEST, WIDEST, 2 * STEPS + 1, dtype=torch.float64)
    sums = []
    for reward in (1.0, 0.0):
        push = integrated_push(method(name), reward - baseline, 1.0, correct=reward > 0)

        def phi(x, push=push):
            log_ratio = x.log1p()
            low = ((log_ratio.clamp(-WIDEST, WIDEST) + WIDEST) * (STEPS / WIDEST)).long().clamp(max=2 * STEPS - 1)
            share = (log_ratio - log_w[low]) * (STEPS / WIDEST)
            return push[low] + share * (push[low + 1] - push[low])

        sums.append(token_sum(mu, pi, phi))
    usable = full_support(mu, pi) & (token_sum(mu, pi, lambda x: (x.log1p().abs() > WIDEST).double()) == 0).all(1)
    excess = torch.maximum(sums[0] - products(mu, pi)[0], sums[1])
    worst = (mean(mu.law(), excess) - divergences(mu, pi).kl_seq)[usable]
    return float(worst.max()) if len(worst) else -1.0


@pytest.mark.parametrize("word", ["any mismatch", "no mismatch"])
def test_rows_that_certify_themselves_never_overstate(word):
    g = torch.Generator().manual_seed(2)
    families = ("unrelated", "noise", "sparse", "biased", "rare tokens")
    pairs = [FAMILIES[f](100, vocab, t, g) for f in families for vocab, t in ((2, 2), (2, 5), (3, 3))]
    for name in claiming(word):
        worst = [overstated(name, mu, pi, b) for mu, pi in pairs for b in (0.0, 0.5, 1.0)]
        assert max(worst) <= 1e-3, name  # the grid's error at the jump of a clip
        assert sum(w > -1 for w in worst) > 30, name  # most kinds of pairs are inside the grid


def test_a_row_without_the_statement_overstates_somewhere():
    """A wrong answer that pi gives fifty times as often, and a second clip that stops counting at three times."""
    mu, pi = (TabularPolicy.independent([[1 - p, p]]) for p in (0.0005, 0.025))
    assert overstated("dual_clip", mu, pi, 1.0) > 3e-4 > 1e-5 > overstated("ppo_clip", mu, pi, 1.0)


def test_dividing_advantages_by_a_deviation_weighs_prompts_and_no_more():
    """V(l (R - b), w) <= l ((R - b)(w - 1) + (1 - R) k3(w)) for any l: what eq. 14 takes of a row that satisfies eq. 12.

    Where V is proportional to the advantage that is eq. 12 itself; a penalty beside it, as of dro, only lowers V.
    """
    rows = claiming("any mismatch", "no mismatch")
    assert {name for name in rows if not weighed(name)} == {"dro", "prime_rl", "prime_rl_ipo"}


def weighed(name: str) -> bool:
    """Whether V is proportional to the advantage, after a check that it stays below the limit."""
    log_w = torch.linspace(-WIDEST, WIDEST, 2 * STEPS + 1, dtype=torch.float64)
    w = log_w.exp()
    proportional = True
    for scale in (0.2, 5.0):
        for reward, b in ((1.0, 0.0), (1.0, 0.9), (0.0, 0.1), (0.0, 1.0), (0.5, 0.0), (0.5, 1.0)):
            limit = (reward - b) * (w - 1) + (1 - reward) * (w - 1 - log_w)
            v = integrated_push(method(name), scale * (reward - b), 1.0, correct=reward > 0)
            step = 2 * WIDEST / STEPS * abs(reward - b) * log_w.abs().clamp(max=2).exp()  # at the jump of a clip
            assert bool((v <= scale * (limit + step)).all()), (name, scale, reward, b)
            one = integrated_push(method(name), reward - b, 1.0, correct=reward > 0)
            proportional &= torch.allclose(v, scale * one, rtol=1e-9, atol=1e-9)
    return proportional
