"""Advantages that fall where rewards rise: a sign, another order of rows, or another reward."""

import json
import math

import numpy as np
import pytest

import offdrift as od


def log(path, of=lambda advantage: advantage, *, groups=40, rewarded=0.4):
    """Groups of eight with rewards 0 and 1, at the same weights; advantages are the group's, or `of` them."""
    rng = np.random.default_rng(0)
    rewards = (rng.random((groups, 8)) < rewarded).astype(float)
    advantages = of(rewards - rewards.mean(1, keepdims=True))
    with path.open("w") as file:
        for group, sibling in np.ndindex(rewards.shape):
            logp = np.minimum(-rng.exponential(1, 6), -0.01)
            row = {"step": group // 4, "group_id": group, "version": 0, "rollout_version": 0}
            row |= {"reward": rewards[group, sibling], "advantages": [advantages[group, sibling]] * 6}
            row |= {"logp_rollout": logp.tolist(), "logp_old": (logp - 1e-4).tolist()}
            file.write(json.dumps(row) + "\n")
    return rewards, advantages, od.audit(path)


def test_a_flipped_sign_is_named_and_nothing_else_is_an_alarm(tmp_path):
    rewards, advantages, found = log(tmp_path / "flipped.jsonl", np.negative)
    assert [(f.rule, f.severity) for f in found.findings] == [("advantages_opposed", "act")]
    by_hand = np.corrcoef(rewards.ravel(), advantages.ravel())[0, 1]
    assert found.metrics["advantage/reward_corr"] == pytest.approx(by_hand, rel=1e-9)
    assert found.metrics["advantage/reward_z"] == pytest.approx(by_hand * math.sqrt(320), rel=1e-9)


@pytest.mark.parametrize(
    "of",
    [
        lambda a: a,
        lambda a: 1000 + a,  # a constant added by a critic
        lambda a: a / np.maximum(a.std(1, keepdims=True), 1e-6),  # GRPO's
        lambda a: np.where(a < 0, 0, a),  # negatives left out
    ],
)
def test_advantages_of_every_baseline_pass(tmp_path, of):
    _, _, found = log(tmp_path / "right.jsonl", of)
    assert found.metrics["advantage/reward_corr"] > 0.5
    assert not found.findings


def test_advantages_of_a_reward_that_is_not_logged_are_not_accused(tmp_path):
    _, _, found = log(tmp_path / "other.jsonl", lambda a: np.random.default_rng(1).normal(size=a.shape))
    assert abs(found.metrics["advantage/reward_z"]) < 4
    assert not found.findings


@pytest.mark.parametrize("rewarded", [0.0, 1.0])
def test_where_rewards_do_not_vary_there_is_no_correlation(tmp_path, rewarded):
    _, _, found = log(tmp_path / "flat.jsonl", np.negative, rewarded=rewarded)
    assert not math.isfinite(found.metrics.get("advantage/reward_corr", math.nan) or math.nan)
    assert [(f.rule, f.severity) for f in found.findings] == [("nothing_to_learn", "watch")]


def test_three_groups_accuse_nobody(tmp_path):
    _, _, found = log(tmp_path / "few.jsonl", np.negative, groups=3)
    assert not found.findings
