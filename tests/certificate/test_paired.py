"""Two policies compared by fresh answers: right as often as it says, in the reading that it says."""

import math

import numpy as np
import pytest
from benchmarks.certificate_fresh import at_distance, kl_of, measured

from offdrift.certificate import Looks
from offdrift.certificate.batch import HostEvidence
from offdrift.certificate.confidence import betting
from offdrift.certificate.paired import Answers, PairedCertificate, certify_fresh
from offdrift.certificate.samples import fresh_curve
from offdrift.errors import BadValueError, MethodError, RecordError


def answered(prompt: np.ndarray, share: np.ndarray, g: np.random.Generator, answers: int, **more) -> Answers:
    """Answers to each draw, right with the probability of its prompt."""
    draw = np.arange(len(prompt)).repeat(answers)
    who = prompt.repeat(answers)
    clusters = more["clusters"][who] if "clusters" in more else None
    return Answers(who, draw, (g.random(len(who)) < share[who]).astype(float), clusters)


def of_distinct(g: np.random.Generator, gain: float = 0.0, prompts: int = 150, answers: int = 2) -> PairedCertificate:
    """Prompts that are easy or hard for both; half of them gain, and half lose."""
    a = np.where(g.random(prompts) < 0.5, 0.15, 0.75)
    b = a + np.where(g.random(prompts) < 0.5, 0.1, -0.1) + gain
    prompt = np.arange(prompts)
    return certify_fresh(answered(prompt, a, g, answers), answered(prompt, b, g, answers))


def test_it_is_false_with_its_probability_at_most():
    g, runs = np.random.default_rng(0), 300
    false = sum(of_distinct(g).certified for _ in range(runs))
    assert 0 < false <= 0.05 * runs + 3 * math.sqrt(0.0475 * runs)
    proofs = [of_distinct(g, gain=0.1, prompts=1200) for _ in range(20)]
    assert min(p.certified for p in proofs)
    assert max(p.gain_low for p in proofs) < 0.13


def test_what_is_hard_about_a_prompt_cancels():
    """Each prompt is always or never solved by A; B solves a twentieth more: an unpaired interval says nothing."""
    g, x = np.random.default_rng(1), np.arange(300)
    a, b = (x % 2).astype(float), (x % 2 + (x % 20 == 0)).astype(float)
    proof = certify_fresh(Answers(x, x, a), Answers(x[::-1], x[::-1], b[::-1]))
    assert proof.gain.mean == pytest.approx(0.05)
    assert proof.certified
    unpaired = g.permutation(b) - g.permutation(a)
    assert betting(unpaired, low=-1.0, high=1.0, sides="low").low < 0


def test_draws_that_repeat_a_prompt_have_two_readings():
    """One prompt has 55 % of the draws and loses .5, the others gain .3: J over draws falls, over prompts it rises."""
    g, runs, false = np.random.default_rng(2), 20, 0
    for _ in range(runs):
        prompt = np.where(g.random(600) < 0.55, 0, g.integers(1, 200, 600))
        loses = np.arange(200) == 0
        a, b = answered(prompt, np.where(loses, 0.9, 0.2), g, 2), answered(prompt, np.where(loses, 0.4, 0.5), g, 2)
        with pytest.raises(RecordError, match=r"A: 600 groups of answers .* distinct prompts.*listed.*drawn"):
            certify_fresh(a, b)
        listed, drawn = certify_fresh(a, b, prompts="listed"), certify_fresh(a, b, prompts="drawn")
        assert listed.certified, "what it says of distinct prompts is true"
        assert "each counted once" in listed.verdict
        assert drawn.prompts == 600
        assert drawn.gain.mean == pytest.approx(-0.14, abs=0.1)
        assert "is drawn" in drawn.verdict
        false += drawn.certified
    assert false == 0


def test_draws_of_a_prompt_are_paired_in_order_and_each_needs_both():
    prompt, draw = np.array([5, 5, 7, 5]), np.array([0, 1, 2, 3])
    a, b = Answers(prompt, draw, np.zeros(4)), Answers(prompt[::-1], draw, np.array([1.0, 0, 0, 0]))
    proof = certify_fresh(a, b, prompts="drawn")
    assert (proof.prompts, proof.gain.mean) == (4, 0.25)
    with pytest.raises(RecordError, match="1 prompts have answers of A alone and 0 of B alone"):
        certify_fresh(a, Answers(prompt[:3], draw[:3], np.zeros(3)), prompts="drawn")


def test_prompts_of_one_cluster_gain_and_lose_together():
    """40 sources of 8 prompts that gain or lose .45 together: no gain on average."""
    g, runs, apart, shared = np.random.default_rng(3), 40, 0, 0
    source = np.arange(320) // 8
    x = np.arange(320)
    for _ in range(runs):
        share = 0.5 + 0.45 * np.where(g.random(40) < 0.5, 1, -1)[source]
        a, b = (answered(x, p, g, 4, clusters=source) for p in (np.full(320, 0.5), share))
        apart += certify_fresh(a, b).certified
        proof = certify_fresh(a, b, prompts="clustered")
        assert proof.prompts == 40
        shared += proof.certified
    assert shared <= 6, "7 or more of 40 have probability .004"
    assert apart > 6


def test_within_a_cluster_each_prompt_counts_once_however_many_answers_it_has():
    """B answered the easy prompt more often, which is no gain."""
    a = Answers(np.array([0, 1]), np.array([0, 1]), np.array([1.0, 0.0]), np.array([9, 9]))
    more = np.array([0, 0, 0, 1])
    b = Answers(more, more, np.array([1.0, 1.0, 1.0, 0.0]), np.full(4, 9))
    assert certify_fresh(a, b, prompts="clustered").gain.mean == 0
    with pytest.raises(RecordError, match="1 prompts are of several clusters"):
        certify_fresh(a, b._replace(clusters=np.array([9, 9, 8, 9])), prompts="clustered")
    with pytest.raises(RecordError, match="not named"):
        certify_fresh(a, b._replace(clusters=None), prompts="clustered")


def test_rewards_are_rescaled_and_alpha_is_shared():
    x, g = np.arange(400), np.random.default_rng(4)
    a, b = ((g.random(400) < p).astype(float) for p in (0.3, 0.6))
    unit = certify_fresh(Answers(x, x, a), Answers(x, x, b))
    wide = certify_fresh(Answers(x, x, 4 * a - 1), Answers(x, x, 4 * b - 1), reward_range=(-1.0, 3.0))
    assert unit.certified
    assert wide.gain_low == pytest.approx(4 * unit.gain_low)
    assert wide.rewards == pytest.approx([4 * r - 1 for r in unit.rewards])
    shared = certify_fresh(Answers(x, x, a), Answers(x, x, b), looks=Looks(at=2, of=3))
    assert shared.gain.alpha == pytest.approx(0.05 * 6 / math.pi**2 / 4 / 3)
    assert shared.gain_low < unit.gain_low
    assert unit.as_dict()["gain_low"] == unit.gain_low
    with pytest.raises(BadValueError, match="outside"):
        certify_fresh(Answers(x, x, 2 * a), Answers(x, x, b))
    with pytest.raises(BadValueError, match="B has no answers"):
        certify_fresh(Answers(x, x, a), Answers(x[:0], x[:0], np.zeros(0)))
    with pytest.raises(MethodError):
        certify_fresh(Answers(x, x, a), Answers(x, x, b), prompts="merged")  # type: ignore[arg-type]


@pytest.mark.parametrize("answers", [1, 4])
def test_a_plan_of_fresh_answers_is_cautious_and_of_the_right_gain(answers):
    """Answers right with .3, and .5 by the other policy, whose ratios are then 5/3 and 5/7."""
    g = np.random.default_rng(5)
    right = g.random(600 * answers) < 0.3
    columns = {"log_product": np.log(np.where(right, 5 / 3, 5 / 7))}
    host = HostEvidence(columns, np.arange(600).repeat(answers), np.zeros(0))
    curve = fresh_curve(host, right.astype(float), alpha=0.05)
    assert list(curve.values()) == sorted(curve.values())
    size = next(n for n, p in curve.items() if p > 0.8)
    share, done, x = np.full(size, 0.3), 0, np.arange(size)
    for _ in range(40):
        done += certify_fresh(answered(x, share, g, answers), answered(x, share + 0.2, g, answers)).certified
    assert done >= 0.7 * 40
    assert size <= 600


@pytest.mark.parametrize(("kl", "better"), [(0.02, "direct"), (0.83, "fresh")])
def test_ratios_are_better_between_near_policies_and_fresh_answers_between_far_ones(kl, better):
    row = measured(16, kl, 256, repetitions=10)
    assert kl_of(at_distance(kl, 16), 16) == pytest.approx(kl)
    assert min((row.direct, "direct"), (row.fresh, "fresh"))[1] == better
    assert max(row.direct, row.fresh) > 2 * min(row.direct, row.fresh)
    assert min(row.direct, row.fresh) > 0
