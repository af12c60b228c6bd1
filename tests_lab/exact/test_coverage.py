"""The simulation of certificates: its truths are sums done by hand, and it notices certificates that are wrong."""

import math

import jaxtyping
import numpy as np
import pytest

from offdrift.certificate import Looks
from offdrift.certificate.certify import certify
from offdrift_lab.exact.coverage import WORLDS, Tallies, Tally, count, simulate, summarize
from offdrift_lab.exact.policy import divergences, returns


@pytest.fixture(autouse=True)
def _without_shape_checks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def tallied(name: str, repetitions: int, **options) -> Tallies:
    world, tallies = WORLDS[name](), {}
    for judgements in simulate(world, repetitions, **options):
        count(tallies, world, judgements)
    return tallies


def test_gains_are_what_the_worlds_say():
    gains = {name: make().gain for name, make in WORLDS.items()}
    assert gains.pop("benign") == pytest.approx(0.057, abs=1e-6)
    for name in ("shared-fate", "rare-catastrophe", "several-looks"):
        assert gains.pop(name) == pytest.approx(0, abs=1e-12)
    assert set(gains) == {"heavy-ratios", "filtered"}
    assert max(gains.values()) < 0.05


def test_truths_of_one_token_are_those_done_by_hand():
    """Half of the prompts go from 1/2 to .8, half from 1/2 to .2; ratios 1.6 and .4 of what is rewarded."""
    world = WORLDS["shared-fate"]()
    kl = math.log(0.5) - (math.log(0.2) + math.log(0.8)) / 2
    truths = {name: mean for name, (mean, _) in world.truths.items()}
    expected = {"gain": 0, "surrogate": 0, "surrogate_masked": 0, "kl_seq": kl, "prefix_kl": kl, "acceptance": 1}
    assert {k: truths[k] for k in expected} == pytest.approx(expected, abs=1e-6)
    assert world.unseen == pytest.approx(0, abs=1e-12)
    # One prompt in 25 is outside whatever is drawn; its reward, .99 of 1, is rejected.
    rare = WORLDS["rare-catastrophe"]()
    assert rare.unseen == pytest.approx(0.04)
    assert rare.truths["acceptance"][0] == pytest.approx(0.96)
    assert rare.truths["rejected_reward"][0] == pytest.approx(0.04 * 0.99)


@pytest.mark.parametrize("name", ["benign", "heavy-ratios", "filtered"])
def test_truths_of_many_tokens_are_those_of_the_enumeration(name):
    world = WORLDS[name]()
    _, prompt, law = world.population
    assert np.bincount(prompt, law) == pytest.approx(np.ones(30))
    exact, drift = returns(world.mu, world.pi, world.rewards), divergences(world.mu, world.pi)
    truths = {k: mean for k, (mean, _) in world.truths.items()}
    if name == "filtered":  # what mu cannot draw is not in the measured surrogate
        assert truths["surrogate"] < float(exact.surrogate.mean()) - 1e-4
        assert float(drift.kl_seq.max()) == math.inf
    else:
        assert truths["surrogate"] == pytest.approx(float(exact.surrogate.mean()), abs=1e-9)
    if name == "benign":
        assert truths["kl_seq"] == pytest.approx(float(drift.kl_seq.mean()), rel=1e-6)
        assert world.unseen == pytest.approx(0, abs=1e-12)
    assert truths["gain"] <= world.gain + 1e-9  # cutting ratios only lowers it


def test_draws_follow_the_law_and_groups_are_prompts():
    world = WORLDS["rare-catastrophe"]()
    rng = np.random.default_rng(0)
    rows = world.population.draw(world.law.numpy(), 20_000, 2, rng)
    shares = np.bincount(rows, minlength=4) / len(rows)
    law = world.law.numpy()[world.population.prompt] * world.population.law
    assert shares == pytest.approx(law, abs=4 * math.sqrt(0.25 / 20_000))
    prompts = world.population.prompt[rows].reshape(-1, 2)
    assert (prompts[:, 0] == prompts[:, 1]).all()
    assert certify(world.draw(rng)).prompts == 64


def test_a_repetition_does_not_depend_on_how_many_there_are():
    world = WORLDS["benign"]()
    few, more = (list(simulate(world, n, seed=4)) for n in (2, 3))
    assert few == more[:2]
    assert few[0] != few[1]
    assert next(simulate(world, 1, seed=5)) != few[0]


@pytest.mark.parametrize("name", [n for n in WORLDS if n != "several-looks"])
def test_no_certificate_is_refuted(name):
    rows = summarize(tallied(name, 40))
    assert {r.repetitions for r in rows} == {40}
    assert [r.statement for r in rows if r.refuted] == []
    assert {"certificate", "by direct", "by TRM", "unseen", "all of it together", "interval of gain"} <= {
        r.statement for r in rows
    }


@pytest.mark.parametrize(
    ("name", "plant", "statement"),
    [("heavy-ratios", "alpha", "all of it together"), ("shared-fate", "answers", "certificate")],
)
def test_a_planted_mistake_is_refuted(name, plant, statement):
    rows = summarize(tallied(name, 80, plant=plant))
    assert statement in {r.statement for r in rows if r.refuted}


@pytest.mark.slow
def test_certificates_of_a_run_hold_only_if_alpha_is_spent_over_it():
    rows = {r.statement: r for r in summarize(tallied("several-looks", 24))}
    spent, each = rows["any of the run, alpha spent"], rows["any of the run, alpha each"]
    assert spent.false == 0
    assert each.false > 3  # of 24, where .05 would be 1.2
    assert (spent.claims, each.claims) == (True, False)
    assert math.fsum(Looks(at=t).share(0.05) for t in range(1, 100_000)) == pytest.approx(0.05, abs=1e-6)


def test_a_row_is_refuted_by_an_exact_interval_and_only_if_it_claims_something():
    """P(Bin(60, .05) >= 9) = .0028 and P(.. >= 8) = .0095; two rows that claim share 5 %."""
    tail = lambda k: math.fsum(math.comb(60, j) * 0.05**j * 0.95 ** (60 - j) for j in range(k, 61))  # noqa: E731
    level = 0.05 / 2
    first = next(k for k in range(60) if tail(k) < level)
    tallies = {
        ("w", "below"): Tally(0.05, True, 60, first - 1, widths=[1.0]),
        ("w", "above"): Tally(0.05, True, 60, first, 30, widths=[1.0, 2.0]),
        ("w", "compared"): Tally(0.05, False, 60, 60, widths=[math.nan]),
    }
    rows = {r.statement: r for r in summarize(tallies)}
    assert {k: r.refuted for k, r in rows.items()} == {"below": False, "above": True, "compared": False}
    assert rows["above"].share == pytest.approx(first / 60)
    assert (rows["above"].speaks, rows["above"].width) == (0.5, 1.5)
    assert (rows["below"].speaks, rows["compared"].width) == (None, None)
