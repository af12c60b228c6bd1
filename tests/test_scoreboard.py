"""The benchmarks behind claims about certificates, gradients and the mismatch budget compute what they say."""

import importlib
import json
import math
import tarfile
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
    # In all but the first sample every second response is right, and drawn 1.9 times as often: ratios have mean 1.
    right = torch.arange(len(better) - 32) % 2 == 0
    product, reward = (at_work.COLUMNS.index(name) for name in ("log_product", "reward"))
    better[32:, product] = torch.where(right, 1.9, 0.1).log().to(better)
    better[32:, reward] = right.to(better)
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


def test_a_frontier_is_pooled_over_seeds_by_the_mean_of_logarithms(neural):
    def row(seed, ratio):
        methods = [
            {"method": "token_is", "over_token": [1.0, 1.0, 1.0]},
            {"method": "none", "over_token": [ratio, 0, 9]},
        ]
        return {"seed": seed, "tokens": 256, "asked_kl": 0.01, "methods": methods}

    (pooled,) = neural.pooled([row(s, r) for s, r in enumerate((0.4, 0.5, 0.625, 0.5))])
    mean, low, high = pooled["over_token"]
    assert mean == pytest.approx(0.5)
    # Student's, 3 degrees of freedom: ln(.8), 0, -ln(.8), 0 have a standard deviation of .223 sqrt(2/3)
    half = 3.182 * np.log(1.25) * (2 / 3) ** 0.5 / 2
    assert (low, high) == pytest.approx((0.5 * np.exp(-half), 0.5 * np.exp(half)), rel=1e-3)
    assert (pooled["seeds"], pooled["verdict"]) == (4, "worse")


# -- how sweeps end --------------------------------------------------------------------------------------


@pytest.fixture
def sweep_folder(tmp_path):
    """A sweep of two arms whose held-out rewards, of 400 responses, are written here."""

    def make(**rewards):
        rows, settings = [], []
        for arm, by_seed in rewards.items():
            settings.append({"name": arm, "arm": arm, "values": {}, "baseline": None if arm == "none" else "none"})
            for seed, values in enumerate(by_seed):
                folder = f"runs/{arm}/recipe/seed-{seed}"
                files = tmp_path / folder / "arms" / arm
                files.mkdir(parents=True)
                evals = [{"update": 8 * i, "reward": v, "prompts": 100, "samples": 4} for i, v in enumerate(values)]
                updates = [
                    {
                        "update": i,
                        "version_lag/max": i % 8,
                        "full/ess_seq_frac": round(1 - 0.1 * (i % 8), 3),
                        "optim/grad_norm": 1.5,
                    }
                    for i in range(16)
                ]
                (files / "eval.jsonl").write_text("".join(json.dumps(x) + "\n" for x in evals))
                (files / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in updates))
                rows.append({"arm": arm, "values": {}, "seed": seed, "folder": folder, "status": "finished"})
        content = {"name": "made", "changes": [], "versions": [], "settings": settings, "runs": rows}
        (tmp_path / "sweep.json").write_text(json.dumps(content))
        return tmp_path

    return make


def test_rises_falls_and_overtakings_are_those_beyond_three_standard_errors(sweep_folder):
    staleness = imported("staleness")
    # At .3 of 400 responses three standard errors of a difference are .097, of an end (twice as many) .069.
    folder = sweep_folder(
        none=[(0.3, 0.5, 0.1, 0.1), (0.3, 0.38, 0.1, 0.1), (0.3, 0.5, 0.3, 0.3)],
        ppo_clip=[(0.3, 0.3, 0.3, 0.3), (0.3, 0.3, 0.3, 0.3), (0.3, 0.3, 0.3, 0.3)],
    )
    content = staleness.of_sweep(folder)
    by_arm = {row["arm"]: row for row in content["settings"]}
    counts = {arm: [row[k] for k in ("rises", "falls", "prospers", "overtakes")] for arm, row in by_arm.items()}
    assert counts == {"none": [2, 2, 1, 1], "ppo_clip": [0, 0, 0, 0]}
    assert by_arm["none"]["end"]["mean"] == pytest.approx(0.5 / 3)
    assert by_arm["none"]["ess"] == pytest.approx([0.35] * 3)  # lags of 6 and 7 are 75 % of the largest
    assert by_arm["ppo_clip"]["less_baseline"]["mean"] == pytest.approx(0.4 / 3)


def test_epochs_and_minibatches_are_told_apart_at_equal_updates():
    """Planted: -.02 a doubling of epochs, -.01 a doubling of minibatches, and seeds that start elsewhere."""
    staleness = imported("staleness")
    runs = []
    for seed in range(3):
        for e in (1, 2, 4):
            for m in (1, 4, 8):
                end = 0.5 - 0.02 * math.log2(e) - 0.01 * math.log2(m) + 0.1 * seed
                row = {"arm": "none", "seed": seed, "start": 0.5, "end": end, "falls": e * m == 32}
                runs.append(row | {"values": {"optim.epochs": e, "optim.minibatches": m}})
    (row,) = staleness.of_reuse([*runs, runs[0] | {"seed": 9}])  # the last seed lacks the rest of the grid
    means = {name: row[name]["mean"] for name in staleness.REUSE_WORDS}
    assert means["epochs"] == pytest.approx(-0.02)
    assert means["minibatches"] == pytest.approx(-0.01)
    # 4 x 1 less 1 x 4, 2 x 4 less 1 x 8, 4 x 4 less 2 x 8: two doublings of each, then one and one.
    assert means["epochs_less_minibatches"] == pytest.approx((-0.02 - 0.01 - 0.01) / 3)
    assert means["change"] == pytest.approx(0.1 - (9 * 0.02 + 15 * 0.01) / 8)
    assert row["seeds"] == 3
    assert row["falls"]["32"] == [3, 3]
    assert row["falls"]["8"] == [0, 6]


def test_an_archive_of_a_sweep_says_what_its_folder_says(sweep_folder, tmp_path, monkeypatch, capsys):
    pack, staleness = imported("pack"), imported("staleness")
    folder = sweep_folder(none=[(0.3, 0.5, 0.1)], token_tis=[(0.3, 0.4, 0.5)])
    before = staleness.of_sweep(folder)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr("sys.argv", ["pack", folder.name, "--to", "all.tar.xz"])
    pack.main()
    assert "2 runs" in capsys.readouterr().out
    (tmp_path.parent / "elsewhere").mkdir()
    with tarfile.open("all.tar.xz") as archive:
        archive.extractall(tmp_path.parent / "elsewhere", filter="data")
    assert staleness.of_sweep(tmp_path.parent / "elsewhere" / folder.name) == before


def test_processes_return_every_unit_with_its_own_result():
    measure = imported("measure")
    units = [9.0, 4.0, 1.0]
    assert dict(measure.in_processes(math.sqrt, units, 2)) == dict(measure.in_processes(math.sqrt, units, 1))
    with pytest.raises(ValueError, match="domain"):
        list(measure.in_processes(math.sqrt, [4.0, -1.0], 2))
