"""What verl reports of a batch, called in-process, against the metrics of the same meaning.

verl's numbers are on padded batches in float64 with masks of integers.
"""

import math

import pytest
import torch

from offdrift.correction import Correction, Weight, rejection
from offdrift.logprobs import LogProbs
from offdrift.stats.drift import DriftStats
from offdrift.stats.metrics import summarize
from tests.parity.peers import EMPTY_ROW, Batch, random_batch, verl_correction

SEEDS = range(6)


SAME_METRIC = {
    "k3_kl": "mismatch/k3", "chi2_token": "mismatch/chi2_token", "chi2_seq": "mismatch/chi2_seq",
    "kl": "mismatch/k1", "log_ppl_diff": "mismatch/log_ppl_diff_mean",
    "log_ppl_abs_diff": "mismatch/log_ppl_gap", "log_ppl_diff_max": "mismatch/log_ppl_diff_max",
    "log_ppl_diff_min": "mismatch/log_ppl_diff_min", "ppl_ratio": "mismatch/ppl_ratio",
    "training_ppl": "old/ppl", "training_log_ppl": "old/log_ppl", "rollout_ppl": "rollout/ppl",
    "rollout_log_ppl": "rollout/log_ppl", "rollout_is_mean": "weight/mean",
    "rollout_is_std": "weight/std", "rollout_is_max": "weight/max", "rollout_is_min": "weight/min",
    "rollout_is_eff_sample_size": "weight/ess_frac", "rollout_is_oob_ratio": "weight/cap_frac",
    "rollout_rs_masked_fraction": "gate/drop_frac_token",
    "rollout_rs_seq_masked_fraction": "gate/drop_frac_seq",
    "rollout_rs_token_k2_masked_fraction": "gate/0/drop_frac_token",
    "rollout_rs_seq_mean_k3_masked_fraction": "gate/1/drop_frac_token",
}  # fmt: skip
"""verl's name, without its prefix -> ours."""
ABOUT_SEQUENCES = {
    "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "training_ppl", "training_log_ppl",
    "rollout_ppl", "rollout_log_ppl",
}  # fmt: skip


def without_the_empty_row(batch: Batch) -> Batch:
    keep = torch.arange(batch.sequences) != EMPTY_ROW
    return Batch(**{name: x[keep] for name, x in vars(batch).items()})


def both_metrics(verl, batch: Batch) -> tuple[dict, dict]:
    """Both sides' metrics under a band and two gates."""
    band = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
    gates = {"rollout_rs": "token_k2,seq_mean_k3", "rollout_rs_threshold": "0.05,0.05"}
    _, _, metrics = verl_correction(verl, batch, **band, **gates)
    packed = batch.pack()
    correction = Correction(
        (rejection("token_k2", 0.05, on="mismatch"), rejection("seq_mean_k3", 0.05, on="mismatch")),
        (Weight(on="mismatch", floor=0.5, cap=5.0, outside="mask"),),
    )
    return metrics, summarize(DriftStats.of(packed, correction(packed)))


@pytest.mark.parametrize("seed", SEEDS)
def test_metrics(verl, seed):
    metrics, mine = both_metrics(verl, without_the_empty_row(random_batch(seed, far=False)))
    compared = 0
    for theirs_name, name in SAME_METRIC.items():
        if theirs_name == "rollout_rs_seq_masked_fraction":
            continue
        # verl rounds 0/1 masks to float32 and adds 1e-8 in its effective sample size.
        assert mine[name] == pytest.approx(metrics[theirs_name], rel=3e-7, abs=1e-9), name
        compared += 1
    assert compared == len(SAME_METRIC) - 1 == 22
    # A sequence with one rejected token counts in verl; with us, one without a kept token.
    assert mine["gate/drop_frac_seq"] < metrics["rollout_rs_seq_masked_fraction"]


PROBABILITIES = {
    "training/rollout_probs_diff_max": "mismatch/prob_diff_max",
    "training/rollout_probs_diff_mean": "mismatch/prob_diff_mean",
    "training/rollout_probs_diff_std": "mismatch/prob_diff_std",
    "training/rollout_actor_probs_pearson_corr": "mismatch/pearson",
}


def compare_probabilities(verl, batch: Batch) -> int:
    tensors = {"rollout_log_probs": batch.rollout, "old_log_probs": batch.old}
    data = verl.DataProto.from_dict(tensors={**tensors, "response_mask": batch.mask, "responses": batch.mask})
    metrics = verl.calculate_debug_metrics(data)
    mine = summarize(DriftStats.of(batch.pack()))
    for name, ours in PROBABILITIES.items():
        assert mine[ours] == pytest.approx(metrics[name], rel=1e-9), name
    return len(PROBABILITIES)


@pytest.mark.parametrize("seed", SEEDS)
def test_metrics_of_probabilities(verl, seed):
    """dis.36: verl's documentation calls them log-probs; its code, as ours, takes probabilities."""
    assert compare_probabilities(verl, random_batch(seed, far=False)) == 4


def test_metrics_of_probabilities_of_a_token_that_was_all_but_impossible(verl):
    compare_probabilities(verl, random_batch(0, far=True))


def test_verl_counts_an_empty_sequence_as_one_with_equal_policies(verl):
    """With 0 in the means over sequences, hence 1 in those of exponentials; ours leave it out."""
    batch = random_batch(0, far=False)
    with_it, mine = both_metrics(verl, batch)
    without, mine_without = both_metrics(verl, without_the_empty_row(batch))
    n = batch.sequences
    for name in ABOUT_SEQUENCES:
        ours = SAME_METRIC[name]
        added = 1 / n if name in ("ppl_ratio", "training_ppl", "rollout_ppl") else 0.0
        assert with_it[name] == pytest.approx(without[name] * (n - 1) / n + added, rel=1e-9), name
        assert mine[ours] == pytest.approx(mine_without[ours], rel=1e-12), name


def test_a_sequence_beyond_20_nats_counts_whole_in_chi2_and_as_20_in_verl(verl):
    """Only the mean is limited, at e^40: what is averaged is not."""
    rollout = torch.tensor([[-16.0, -16.0], [-1.0, -1.0]], dtype=torch.float64)
    old = torch.tensor([[-1.0, -1.0], [-14.0, -14.0]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.int64)
    for sign in (1, -1):
        mu, pi = (rollout, old) if sign > 0 else (old, rollout)
        metrics = verl.rollout_corr_helper.compute_offpolicy_metrics(pi, mu, mask)
        mine = summarize(DriftStats.of(LogProbs.pack(mu, None, pi, mask=mask)))
        assert metrics["chi2_seq"] == pytest.approx((math.exp(40) + math.exp(-40)) / 2 - 1)
        assert mine["mismatch/chi2_seq"] == pytest.approx(math.expm1(40))
    near, far, mask = old[1:] + 13, old[1:] - 8, mask[1:]
    metrics = verl.rollout_corr_helper.compute_offpolicy_metrics(far, near, mask)
    mine = summarize(DriftStats.of(LogProbs.pack(near, None, far, mask=mask)))
    assert metrics["chi2_seq"] == pytest.approx(mine["mismatch/chi2_seq"]) == pytest.approx(-1)


def test_a_log_ratio_beyond_20_counts_as_20_with_us_and_whole_in_verls_kl(verl):
    """verl clamps what it gates and weights by, and chi2, but neither kl nor k3_kl."""
    rollout = torch.tensor([[-25.0, -1.0]], dtype=torch.float64)
    old = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.int64)
    metrics = verl.rollout_corr_helper.compute_offpolicy_metrics(old, rollout, mask)
    mine = summarize(DriftStats.of(LogProbs.pack(rollout, None, old, mask=mask)))
    assert metrics["kl"] == pytest.approx(-24 / 2)
    assert mine["mismatch/k1"] == pytest.approx(-20 / 2)
    assert metrics["k3_kl"] == pytest.approx((math.exp(24) - 25) / 2)
    assert mine["mismatch/k3"] == pytest.approx((math.exp(20) - 21) / 2)
    assert metrics["chi2_token"] == pytest.approx(mine["mismatch/chi2_token"])
