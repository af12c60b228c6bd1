"""More than one look: certificates that share a probability of error are false together as often as it says."""

import itertools
import math

import numpy as np
import pytest
import torch

from offdrift.certificate.batch import BatchEvidence
from offdrift.certificate.certify import certify
from offdrift.certificate.confidence import LARGEST_BET, Looks, betting
from offdrift.certificate.regions import TrustRegion
from offdrift.divergence.evidence import Divergence
from offdrift.errors import BadValueError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments

PROMPTS = 64


pytestmark = pytest.mark.usefixtures("without_shape_checks")


def rewards_of_coins(g: torch.Generator, prompts: int = PROMPTS) -> torch.Tensor:
    return torch.randint(2, (prompts,), generator=g).float()


def evidence(log_w: torch.Tensor, rewards: torch.Tensor, ids: torch.Tensor | None = None) -> BatchEvidence:
    """Answers of one token with these log-ratios and rewards."""
    rollout = torch.full((len(log_w),), -1.0, dtype=torch.float64)
    segments = Segments.from_lengths([1] * len(log_w), group_ids=ids)
    lp = LogProbs.pack(rollout, rollout + log_w, segments=segments)
    return BatchEvidence.of(lp, rewards, region=TrustRegion(horizon=1, delta=1.0))


def no_gain(g: torch.Generator, prompts: int = PROMPTS) -> BatchEvidence:
    """mu tosses a fair coin, pi one of 3/4; reward 1 or 0 whatever the side: J(pi) = J(mu) = 1/2 to the last digit."""
    log_w = torch.tensor([1.5, 0.5], dtype=torch.float64).log()[torch.randint(2, (prompts,), generator=g)]
    return evidence(log_w, rewards_of_coins(g, prompts))


def test_a_series_spends_alpha_and_no_more():
    """sum 1/t^2 = pi^2/6 (Euler), and what is left after look n lies between 1/(n + 1) and 1/n."""
    assert Looks(at=1).share(0.05) == pytest.approx(0.05 * 0.6079271018540267)
    assert Looks(at=10).share(0.05) == pytest.approx(0.05 * 0.006079271018540267)
    n = 1000
    spent = sum(Looks(at=t).share(0.05) for t in range(1, n + 1))
    left = 0.05 * 6 / math.pi**2
    assert 0.05 - left / n < spent < 0.05 - left / (n + 1)


def test_the_best_of_k_and_a_series_multiply():
    assert Looks().share(0.05) == 0.05
    assert Looks(of=8).share(0.05) == 0.05 / 8
    assert Looks(of=8, anytime=True).share(0.05) == 0.05 / 8
    assert Looks(at=3, of=8).share(0.05) == pytest.approx(Looks(at=3).share(0.05) / 8)


def test_what_cannot_be_is_refused():
    for wrong in ({"at": 0}, {"of": 0}, {"at": -1}):
        with pytest.raises(BadValueError, match="counted from 1"):
            Looks(**wrong)
    with pytest.raises(MethodError, match="hold at every moment"):
        Looks(at=1, anytime=True)


def test_the_best_of_many_is_false_no_more_often_than_alpha():
    """32 policies that gain nothing, judged by the same 64 rollouts: is any of them certified?"""
    runs, policies = 20, 32
    g, falsely = torch.Generator().manual_seed(1), {"of": 0, "once": 0}
    for _ in range(runs):
        rewards = rewards_of_coins(g)
        sides = torch.randint(2, (PROMPTS, policies), generator=g)
        ratios = torch.tensor([1.5, 0.5], dtype=torch.float64).log()[sides]  # a token each that one policy tilts
        batches = [evidence(log_w, rewards) for log_w in ratios.T]
        falsely["of"] += any(certify(b, looks=Looks(of=policies)).certified for b in batches)
        falsely["once"] += any(certify(b).certified for b in batches)
    assert falsely["of"] <= 3
    assert falsely["once"] >= 6


@pytest.mark.parametrize("p", [0.5, 0.1])
def test_an_anytime_interval_holds_at_every_moment(p: float):
    """40 samples that grow to 1024, looked at whenever one half more has arrived, at alpha = .2."""
    rng, misses = np.random.default_rng(2), {"anytime": 0, "each look by itself": 0}
    moments = [round(16 * 1.5**k) for k in range(11)]
    runs, alpha = 40, 0.2
    for _ in range(runs):
        x = (rng.random(moments[-1]) < p).astype(float)
        for name, anytime in (("anytime", True), ("each look by itself", False)):
            found = [betting(x[:n], alpha=alpha, anytime=anytime) for n in moments]
            misses[name] += any(not e.low <= p <= e.high for e in found)
    most = runs * alpha + 2 * math.sqrt(runs * alpha * (1 - alpha))
    assert misses["anytime"] <= most
    assert misses["each look by itself"] > misses["anytime"]


def test_an_anytime_interval_never_takes_back_what_it_said():
    """Bets do not know how many draws there will be: intervals are nested. By ones that do, they are not."""
    x = np.random.default_rng(3).beta(2, 3, size=300)
    nested = {}
    for anytime in (True, False):
        ends = [betting(x[:n], anytime=anytime) for n in range(20, 301, 7)]
        pairs = list(itertools.pairwise(ends))
        nested[anytime] = all(a.low <= b.low + 1e-12 and b.high <= a.high + 1e-12 for a, b in pairs)
    assert len(pairs) == 40
    assert nested == {True: True, False: False}


def test_an_anytime_interval_is_hardly_wider():
    """Measured for the docstring, for coins and for a narrow variable, where it is stopped at any size."""
    rng, wider = np.random.default_rng(4), []
    for n in (64, 100, 360, 1024):
        for x in ((rng.random(n) < 0.5).astype(float), (rng.random(n) < 0.1).astype(float), rng.beta(9, 9, size=n)):
            once, always = (betting(x, alpha=0.025, sides="low", anytime=a) for a in (False, True))
            wider.append((always.mean - always.low) / (once.mean - once.low))
    assert len(wider) == 12
    assert 1.0 < np.mean(wider) < 1.3
    assert max(wider) < 1.5


def test_the_capital_by_a_slow_loop():
    """At its lower end, the mean capital of twelve bettors has reached 1/alpha at some moment, and just so."""
    x, alpha = np.random.default_rng(7).beta(2, 2, size=50), 0.05
    low = betting(x, alpha=alpha, sides="low", anytime=True).low
    capital, most = [1.0] * 12, 0.0
    for i, value in enumerate(x):
        before = list(x[:i])
        means = [(0.5 + sum(before[: k + 1])) / (k + 2) for k in range(i)]
        variance = (0.25 + sum((v - m) ** 2 for v, m in zip(before, means))) / (i + 1)
        for k in range(12):
            bet = min(math.sqrt(2 * math.log(1 / alpha) / (2 ** (4 + k) * variance)), LARGEST_BET / low)
            capital[k] *= 1 + bet * (value - low)
        most = max(most, sum(capital) / 12)
    assert 0.3 < low < 0.5
    assert most == pytest.approx(1 / alpha, rel=1e-9)


def test_a_certificate_that_holds_at_every_moment_counts_prompts_in_order_of_arrival():
    """More prompts change nothing of what was bet: every interval of the smaller batch holds the larger one's."""
    g = torch.Generator().manual_seed(5)
    n, answers = 200, 2
    ids = torch.randperm(10**6, generator=g)[:n].repeat_interleave(answers)  # numbers say nothing of the order
    log_w = 0.15 * torch.randn(n * answers, dtype=torch.float64, generator=g) - 0.01
    rewards = torch.rand(n * answers, generator=g)

    def judged(prompts: int, anytime: bool):
        rows = slice(0, prompts * answers)
        batch = evidence(log_w[rows], rewards[rows], ids[rows])
        return certify(batch, looks=Looks(anytime=anytime))

    gains = (rewards.double() * (log_w.exp() - 1)).view(n, answers).mean(1).numpy()
    e = judged(n, True).estimates["gain"]
    assert e.low == pytest.approx(
        betting(gains, low=-1, high=1, alpha=e.alpha, sides="low", anytime=True).low, rel=1e-9
    )
    compared = 0
    for fewer, more in ((60, 61), (60, 200), (150, 200)):
        a, b = judged(fewer, True), judged(more, True)
        assert (a.prompts, b.prompts) == (fewer, more)
        for name, e in a.estimates.items():
            later = b.estimates[name]
            assert e.low <= later.low + 1e-12, name
            assert later.high <= e.high + 1e-12, name
            compared += 1
    assert compared == 3 * len(a.estimates) >= 27
    shuffled = [judged(prompts, False).estimates["gain"].low for prompts in range(60, 90)]
    assert any(a > b for a, b in itertools.pairwise(shuffled)), "a shuffle of more prompts is another order"


def test_what_a_prompt_has_left_is_limited_at_every_moment():
    """A prompt that leaves the region at the end does not lower what was said of those before."""
    log_w = torch.zeros(100, dtype=torch.float64)
    log_w[-1] = 0.5
    rewards = torch.ones(100)
    region = TrustRegion(horizon=1, delta=1.0)
    kl = torch.where(log_w > 0, 2.0, 0.0)

    def unseen(n: int) -> float:
        rollout = torch.full((n,), -1.0, dtype=torch.float64)
        lp = LogProbs.pack(rollout, rollout + log_w[:n], segments=Segments.from_lengths([1] * n))
        exact = {"kl_rollout_current": Divergence.exact("kl_rollout_current", kl[:n])}
        batch = BatchEvidence.of(lp, rewards[:n], region=region, divergences=exact)
        return certify(batch, looks=Looks(anytime=True)).unseen

    before, after = unseen(99), unseen(100)
    assert 0 < after <= before < 0.2


@pytest.mark.parametrize(
    ("looks", "words", "taken_for_granted"),
    [
        (Looks(), "one policy, one look", "up to k alpha"),
        (Looks(of=4), "whichever of 4 policies is shown, one look, which spends 0.013 of 0.05", "at most 4 policies"),
        (Looks(at=2), "all certificates of this series together, this is look 2, which spends 0.0076 of 0.05", "without leaving one out"),
        (Looks(at=2, of=4, series="this run"), "all certificates of this run together, this is look 2 at one of 4 policies", "at most 4 policies each"),
        (Looks(anytime=True), "one policy, however often you look as rollouts arrive", "order of arrival"),
        (Looks(anytime=True, of=2), "one of 2 policies, however often you look as rollouts arrive", "at most 2 policies"),
    ],
)  # fmt: skip
def test_a_certificate_says_what_its_confidence_is_about(looks: Looks, words: str, taken_for_granted: str):
    proof = certify(no_gain(torch.Generator().manual_seed(6)), looks=looks)
    told = proof.as_dict()
    assert told["holds_for"].startswith(words)
    assert f"ith probability 0.95 ({told['holds_for']}; direct)" in proof.verdict
    assert taken_for_granted in proof.verdict
    assert told["alpha_total"] == 0.05
    assert told["alpha"] == looks.share(0.05) == proof.as_metrics()["certificate/alpha"]
    assert (told["look"], told["of"], told["anytime"]) == (looks.at, looks.of, looks.anytime)
    assert proof.as_metrics()["certificate/look"] == looks.at
