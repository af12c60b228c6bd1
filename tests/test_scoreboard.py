"""The benchmarks behind claims about certificates, gradients and the mismatch budget compute what they say."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offdrift.segments import Segments

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def neural():
    return imported("frontier_neural")


@pytest.fixture(scope="module")
def at_work():
    return imported("certificates_at_work")


@pytest.fixture(scope="module")
def factorial():
    return imported("factorial")


# -- the neural frontier -------------------------------------------------------------------------------


def test_bias_and_variance_are_free_of_the_noise_of_their_own_means(neural):
    rng = np.random.default_rng(0)
    true, steps, own = np.zeros(40), 24, 48
    true[0] = 1.0
    mean = true.copy()
    mean[1] = 0.5  # a bias of 0.25 |grad J|^2, and noise of 4 in total
    rows = []
    for _ in range(200):
        mine = mean + rng.normal(size=(steps, 40)) * (4 / 40) ** 0.5
        oracle = true + rng.normal(size=(own, 40)) * (4 / 40) ** 0.5
        stacked = np.concatenate([mine, oracle])
        rows.append(neural.statistics(stacked @ stacked.T, np.arange(steps), steps + np.arange(own)))
    bias, variance, progress, cosine = np.mean(rows, axis=0)
    assert bias == pytest.approx(0.25, abs=0.03)  # with the noise's own squares it is 0.25 + 4/24 + 4/48
    assert variance == pytest.approx(4.0, rel=0.03)
    assert progress == pytest.approx(1 / 4.25, rel=0.08)
    assert cosine == pytest.approx(1 / 1.25**0.5, rel=0.03)


def test_ratios_lie_between_the_tokens_and_the_sequences(neural):
    lengths = [70, 3, 100]
    log_w = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 10
    weights = neural.ratios(log_w, Segments.from_lengths(lengths))
    at = 0
    for length in lengths:
        own = log_w[at : at + length]
        for k in neural.WINDOWS:
            expected = torch.stack([own[max(0, t - k + 1) : t + 1].sum().exp() for t in range(length)])
            assert torch.allclose(weights[f"window {k}"][at : at + length], expected)
        for a in neural.POWERS:
            assert torch.allclose(weights[f"power {a:g}"][at : at + length], (own + a * (own.sum() - own)).exp())
        at += length


def test_on_policy_every_method_pushes_each_token_by_its_advantage(neural):
    bed = neural.Bed(0)
    (drawn,) = bed.draw(1, 12, "full")
    with torch.no_grad():
        scores = neural.score(bed.model, drawn)
    advantages = drawn.rewards - drawn.rewards.mean()
    for name, c in neural.coefficients(drawn, scores.logp, scores.logits, advantages, neural.ROWS).items():
        assert torch.allclose(c, advantages.repeat_interleave(12), atol=2e-3), name


# -- certificates at work ------------------------------------------------------------------------------


def test_evidence_is_in_the_order_of_the_answers(neural, at_work):
    bed = neural.Bed(1)
    engine = at_work.make_engine("transformers", bed.model, batch_size=64)
    sampling = at_work.Sampling(max_tokens=24, stop_token_ids=(1,))
    problems = bed.task.sample(300, seed=3)
    drawn = at_work.rollout(engine, problems, bed.task, bed.tokenizer, sampling, samples=1, seed=3, evidence="full")
    batch = at_work.evidence(drawn, bed.model, 24)
    assert torch.equal(batch.column("length"), drawn.lengths.double())  # pieces are cut by length
    assert torch.equal(batch.column("reward"), drawn.rewards.double())
    assert float(batch.column("kl_total").max()) < 1e-9  # the same weights


def test_certificates_are_of_disjoint_samples_and_wrong_ones_are_counted(neural, at_work):
    bed = neural.Bed(2)
    engine = at_work.make_engine("transformers", bed.model, batch_size=64)
    problems = bed.task.sample(200, seed=4)
    drawn = at_work.rollout(
        engine, problems, bed.task, bed.tokenizer, at_work.Sampling(max_tokens=4), samples=1, seed=4, evidence="full"
    )
    batch = at_work.evidence(drawn, bed.model, 4)
    few, many = at_work.certificates(batch, (0.0, -0.01, 0.01))
    assert (few["prompts"], few["certificates"]) == (32, 6)
    assert (many["prompts"], many["certificates"]) == (128, 1)
    assert few["certifies"]["all"] == few["above_truth"]["all"] == 0  # nothing changed, and nothing is certified
    better = batch.columns.clone()
    better[32:, at_work.COLUMNS.index("log_product")] = 2.0  # all but the first sample
    better[32:, at_work.COLUMNS.index("reward")] = 1.0
    (few, _) = at_work.certificates(replace(batch, columns=better), (0.0, 0.0, 0.0))
    assert few["certifies"]["all"] == few["above_truth"]["all"] == 5
    (lower, _) = at_work.certificates(batch, (-9.0, -9.0, -9.0))
    assert lower["above_truth"]["all"] == 6


# -- the mismatch budget -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.01, 0.011, 0.012], "falsified"),
        ([0.0, 0.0001, -0.0001], "holds"),
        ([0.02, -0.02, 0.01], "undecided"),
        ([0.02], "untested"),
        ([], "untested"),
    ],
)
def test_the_budget_is_judged_by_the_interval(factorial, values, expected):
    assert factorial.verdict(factorial.interval(values)).split(":")[0] == expected
