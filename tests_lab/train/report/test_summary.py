"""An arm's row: weighted means, what is missing is None, and notes on what a reader must know."""

import pytest

from offdrift.judge import load_rules
from offdrift.methods import METHODS
from offdrift_lab.train.loop.record import summarize_arm
from offdrift_lab.train.report.stored import StoredArm


def metrics(**changes) -> dict:
    row = {
        "update": 1, "batch/tokens": 10, "reward/mean": 0.5, "gate/acceptance_seq": 0.9,
        "divergence/kl_rollout_current_mean": 0.1, "divergence/kl_rollout_current_max": 0.4,
        "full/ess_frac": 0.8, "full/log_ppl_gap": 0.02, "certificate/kl_seq": 1.0,
        "certificate/falsified": 0, "divergence/grade": "exact",
        "gate/0/drop_frac_token": 0.1, "weight/cap_frac": 0.0,
    }  # fmt: skip
    return {**row, **changes}


def summary(name: str, rows: list[dict]) -> dict:
    evals = [{"update": 0, "reward": 0.2, "prompts": 64}, {"update": 2, "reward": 0.6, "prompts": 64}]
    return summarize_arm("arm", METHODS[name], name, rows, evals, seconds=2.0)


def test_divergences_are_weighted_by_tokens_and_extremes_are_extremes():
    got = summary("trm_max", [
        metrics(),
        metrics(**{"batch/tokens": 30, "divergence/kl_rollout_current_mean": 0.5, "divergence/kl_rollout_current_max": 0.2, "certificate/falsified": 1, "certificate/kl_seq": 3.0}),
    ])  # fmt: skip
    assert got["kl_mean"] == pytest.approx((10 * 0.1 + 30 * 0.5) / 40)
    assert got["kl_max"] == 0.4
    assert got["falsified_updates"] == 1
    assert got["bound"] == 2.0
    assert (got["reward_before"], got["reward_after"]) == (0.2, 0.6)
    assert got["tokens_per_s"] == 20.0
    assert got["notes"] == []


@pytest.mark.parametrize(("norms", "moved"), [((0, 0, 0), 0), ((0, 1, 0), 1), ((1, 0, 0), 2)])
@pytest.mark.parametrize("flat", [True, False])
def test_only_updates_behind_one_with_a_gradient_are_said_to_have_moved_the_weights(norms, moved, flat):
    rows = [metrics(**{"optim/empty": float(not x), "groups/flat_frac": float(flat and not x)}) for x in norms]
    (note,) = (note for note in summary("none", rows)["notes"] if "the gradient was 0" in note)
    assert note.startswith(f"the gradient was 0 in {norms.count(0)} of 3 updates")
    assert ("earned the same" in note) == flat
    assert ("AdamW" in note) == ("skip_empty" in note) == bool(moved)
    assert (f"in {moved} of them AdamW" in note) == bool(moved)


def test_what_was_not_measured_is_none():
    row = metrics()
    for key in [k for k in row if k.startswith(("divergence/kl", "certificate"))]:
        row[key] = None
    got = summary("none", [row])
    assert got["kl_mean"] is got["kl_max"] is got["bound"] is got["falsified_updates"] is None
    assert summary("none", [])["acceptance"] is None


@pytest.mark.parametrize(
    ("share", "floor", "notes"),
    [
        (0.5, 0.7, ("accepted 50.0 % of the sequences, below 70 %: updates rest on few sequences (Remark 4.3)",)),
        (0.7, 0.7, ()),
        (0.5, 0.5, ()),
        (0.69, 0.9, ("accepted 69.0 % of the sequences, below 90 %: updates rest on few sequences (Remark 4.3)",)),
    ],
)
def test_the_note_on_few_sequences_is_that_of_the_rules_it_is_shown_by(share, floor, notes):
    """The note that an earlier version stored, by its own threshold, is replaced."""
    limits = load_rules().limits | {"acceptance_low": floor}
    stored = {"acceptance": share, "notes": ["accepted 50% of the sequences, below the 70 % that the Trust Region ..."]}
    assert StoredArm("trm_max", True, stored, limits=limits).notes == notes
    assert summary("trm_max", [metrics(**{"gate/acceptance_seq": share})])["notes"] == []


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("trm_max", {"gate/0/drop_frac_token": 0.0}, "gate 0 never rejected a token"),
        ("token_tis", {}, "no weight ever met its limits"),
        (
            "ppo_clip",
            {"objective/clip_frac_active": 0.0, "staleness/abs_log_ratio_max": 0.0},
            "the objective's clip never changed a token: the staleness ratio was 1 at every token, so nothing was corrected, "
            "and the arm would have gone the same way without it",
        ),
        (
            "ppo_clip",
            {"objective/clip_frac_active": 0.0, "staleness/abs_log_ratio_max": 0.05},
            "never changed a token; the largest |log staleness ratio| was 0.05 nat",
        ),
        ("full_is", {"weight/changed_frac": 0.0}, "no weight ever differed from 1"),
        (
            "grpo",
            {"objective/clip_frac_active": 0.1, "old/stale_frac": 0.5, "old/version_lag": 3},
            "old log-probs are stale: taken up to 3 updates after",
        ),
        ("none", {"divergence/grade": "interval"}, "lower ends of certified intervals"),
    ],
)
def test_notes(name, changes, words):
    assert words in summary(name, [metrics(**changes)])["notes"][0]
