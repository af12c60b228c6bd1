"""The replay buffer: who is held, who is picked, what corrects for it, and what a resumed run finds."""

from __future__ import annotations

import json
import math

import pytest
import torch

from offdrift.batch_info import BatchInfo
from offdrift.errors import RecipeError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import method
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments, cumulative
from offdrift_lab.train.data.buffer import Buffer
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings import recipe
from tests_lab.train.conftest import short_arms, small_recipe

WHERE = Provenance("test", "1", "m", "float32", None, Sampling(4))


def drawn(rewards: list[list[float]], *, version: int = 0, first_prompt: int = 0, first_id: int = 0) -> Rollouts:
    """A batch with one group per list of rewards; every response has two tokens."""
    sizes = torch.tensor([len(r) for r in rewards])
    b = int(sizes.sum())
    ids = torch.arange(len(rewards)).repeat_interleave(sizes)
    return Rollouts(
        tokens=torch.arange(2 * b),
        logp_rollout=-torch.ones(2 * b),
        cu_seqlens=cumulative(torch.full((b,), 2)),
        rollout_version=torch.full((2 * b,), version),
        prompt_tokens=first_prompt + ids,
        prompt_cu_seqlens=cumulative(torch.ones(b, dtype=torch.int64)),
        group_ids=first_id + ids,
        finish=("stop",) * b,
        provenance=WHERE,
        rewards=torch.tensor([x for r in rewards for x in r]),
    )


def buffer_of(capacity: int = 100, **settings) -> Buffer:
    return Buffer(recipe.BufferSettings(capacity=capacity, **settings), capacity)


def test_the_oldest_leave_a_full_buffer():
    """Capacity 4, inserts 1 to 6: [3, 4, 5, 6], mean age 1.5 at 6 (arXiv:2604.08706's example)."""
    buffer = buffer_of(4)
    for i in range(1, 7):
        buffer.add(i, drawn([[1.0, 0.0]], version=i, first_prompt=i))
    assert buffer.groups.batch.tolist() == [3, 4, 5, 6]
    assert sorted(buffer.batches) == [3, 4, 5, 6]
    sums = buffer.sums(6)
    assert float(sums["buffer/age"] / sums["buffer/n"]) == 1.5
    assert float(sums["buffer/prompts"]) == 4


def test_age_and_use_end_a_groups_stay():
    buffer = buffer_of(max_age=2, max_uses=2)
    buffer.add(0, drawn([[1.0], [0.0]], version=0))
    buffer.add(1, drawn([[1.0]], version=3))
    buffer.expire(2)
    assert len(buffer) == 3
    buffer.expire(3)
    assert buffer.groups.batch.tolist() == [1]
    for _ in range(2):
        buffer.expire(3)
        assert len(buffer.pick(1, now=3, seed=0, progress=0.0).rollouts.finish) == 1
    buffer.expire(3)
    assert len(buffer) == 0
    assert not buffer.batches


def test_a_pick_is_whole_groups_that_keep_apart():
    """Groups of different batches have the same ids there, and different sizes."""
    buffer = buffer_of()
    sizes = [[1.0] * 2, [0.5] * 3], [[0.1] * 4, [0.2] * 1]
    for index, rewards in enumerate(sizes):
        buffer.add(index, drawn(rewards, version=index, first_prompt=10 * index, first_id=7))
    everything = buffer.pick(4, now=1, seed=3, progress=0.0).rollouts
    by_group: dict[int, list[tuple[float, int]]] = {}
    for g, r, prompt in zip(everything.group_ids.tolist(), everything.rewards, everything.prompt_tokens, strict=True):
        by_group.setdefault(g, []).append((round(float(r), 3), int(prompt)))
    found = sorted(sorted(set(group)) for group in by_group.values())
    assert found == [[(0.1, 10)], [(0.2, 11)], [(0.5, 1)], [(1.0, 0)]]
    assert sorted(map(len, by_group.values())) == [1, 2, 3, 4]
    # A sequence's tokens travel with it.
    first = everything.tokens[everything.cu_seqlens[:-1]]
    assert (everything.tokens[everything.cu_seqlens[:-1] + 1] == first + 1).all()


def test_probabilities_and_weights_are_the_papers():
    """P of priorities 1, .5, .25 at alpha .6, and the weights at beta .4; priorities of |R| = 1 at five ages."""
    buffer = buffer_of(pick="freshness", tau=500)
    buffer.add(0, drawn([[1 - 1e-6], [0.5 - 1e-6], [0.25 - 1e-6]], version=0))
    p = buffer.log_probabilities(0).exp()
    torch.testing.assert_close(p, torch.tensor([0.47732, 0.314914, 0.207766], dtype=torch.float64), atol=1e-6, rtol=0)
    picked = buffer.pick(3, now=0, seed=0, progress=0.0)
    order = picked.rollouts.rewards.argsort(descending=True)
    torch.testing.assert_close(picked.sample_weight[order], torch.tensor([0.716978, 0.846745, 1.0]), atol=1e-6, rtol=0)
    at_the_end = buffer.pick(3, now=0, seed=0, progress=1.0)  # beta 1: weight * P is the same for all
    order = at_the_end.rollouts.rewards.argsort(descending=True)
    torch.testing.assert_close((at_the_end.sample_weight[order] * p).double(), torch.full((3,), float(p[2])).double())

    aged = buffer_of(pick="freshness", tau=500, alpha=1)
    for i, version in enumerate((1000, 900, 653, 500, 0)):
        aged.add(i, drawn([[1.0]], version=version))
    relative = aged.log_probabilities(1000).exp()
    expected = torch.tensor([1, math.exp(-0.2), math.exp(-347 / 500), math.exp(-1), math.exp(-2)], dtype=torch.float64)
    torch.testing.assert_close(relative / relative[0], expected)
    ancient = aged.log_probabilities(10**7)
    assert ancient.isfinite().all()
    torch.testing.assert_close(ancient.exp(), relative)


@pytest.mark.parametrize("how", ["uniform", "freshness"])
def test_groups_are_picked_as_often_as_their_probability_says(how):
    buffer = buffer_of(pick=how, **({} if how == "uniform" else {"tau": 3}))
    for version in range(6):
        buffer.add(version, drawn([[1.0], [0.3]], version=version, first_prompt=version))
    p = buffer.log_probabilities(6).exp()
    trials = 1500
    counts = torch.zeros(12)
    for seed in range(trials):
        before = buffer.groups.uses.clone()
        buffer.pick(1, now=6, seed=seed, progress=0.0)
        counts += buffer.groups.uses - before
    chi2 = float(((counts - trials * p).square() / (trials * p)).sum())
    assert chi2 < 45  # 11 degrees of freedom: exceeded with probability 5e-6
    assert (how == "uniform") == bool((p == p[0]).all())


def test_the_priority_of_a_group_is_its_mean_reward_or_surprise():
    rewards = [[1.0, 1.0], [1.0, 0.0], [-1.0, -1.0]]
    for priority, expected in (("reward", [1.0, 0.5, 1.0]), ("advantage", [0.0, 0.5, 0.0])):
        buffer = buffer_of(pick="freshness", priority=priority)
        buffer.add(0, drawn(rewards))
        assert buffer.groups.value.tolist() == expected


def test_tau_is_the_age_at_which_ess_really_falls():
    """Batches whose ESS is exp(-age / 7) at whatever ages give tau = 7; without any fall it is as good as infinite."""
    buffer = buffer_of(pick="freshness", tau="ess")
    assert buffer.tau > 1e5
    for age in (1.0, 4.0, 2.5, 0.0, 9.0):
        buffer.learn({"version_lag/mean": age, "full/ess_seq_frac": math.exp(-age / 7)})
    assert buffer.tau == pytest.approx(7)
    for broken in (math.nan, 0.0):
        buffer.learn({"version_lag/mean": 3.0, "full/ess_seq_frac": broken})
    assert buffer.tau == pytest.approx(7)
    for _ in range(300):  # it follows: the drift has become twice as fast
        buffer.learn({"version_lag/mean": 2.0, "full/ess_seq_frac": math.exp(-2 / 3.5)})
    assert buffer.tau == pytest.approx(3.5)


def test_certificates_hear_whether_a_batch_is_new_to_the_policy():
    def independent(count, times=1, **settings):
        buffer = buffer_of(**settings)
        buffer.add(0, drawn([[1.0], [0.0], [0.5]]))
        return [buffer.pick(count, now=0, seed=i, progress=0.0).independent for i in range(times)]

    assert independent(3, 2) == [True, False]
    assert independent(2) == [True]
    assert independent(3, pick="freshness") == [True]  # all of them: nothing was chosen
    assert independent(2, pick="freshness") == [False]


def test_a_state_brings_back_the_very_picks():
    batches = {i: drawn([[1.0], [0.3], [0.6]], version=i, first_prompt=3 * i) for i in range(4)}
    buffer = buffer_of(5, pick="freshness", max_uses=3)
    for i, batch in batches.items():
        buffer.add(i, batch)
        buffer.pick(2, now=i, seed=i, progress=0.0)
        buffer.expire(i)
    buffer.learn({"version_lag/mean": 3.0, "full/ess_seq_frac": 0.5})
    other = buffer_of(5, pick="freshness", max_uses=3)
    other.load(json.loads(json.dumps(buffer.state())), batches.__getitem__)
    assert other.state() == buffer.state()
    assert other.tau == buffer.tau
    for seed in range(5):
        a, b = (x.pick(3, now=5, seed=seed, progress=0.5) for x in (buffer, other))
        assert torch.equal(a.rollouts.tokens, b.rollouts.tokens)
        assert torch.equal(a.sample_weight, b.sample_weight)


@pytest.mark.parametrize("row", ["grpo", "oapl", "token_tis", "dr_grpo"])
def test_a_sample_weight_multiplies_the_sequences_share_of_loss_and_gradient(row):
    g = torch.Generator().manual_seed(0)
    mu = -torch.rand(7, generator=g)
    segments = Segments.from_lengths([3, 4], group_ids=torch.tensor([0, 0]))
    advantages = torch.tensor([0.5, 0.5, 0.5, -0.5, -0.5, -0.5, -0.5])
    rewards = torch.tensor([1.0, 0.0])

    def gradient(weight):
        logp = (mu - 0.1).requires_grad_()
        lp = LogProbs.pack(mu, logp, mu, logp_ref=mu, segments=segments)
        info = BatchInfo(rewards=rewards, sample_weight=weight)
        policy_loss(lp, method(row), advantages, info, horizon=4).loss.backward()
        return logp.grad

    whole = gradient(None)
    assert whole.abs().min() > 0
    weighted = gradient(torch.tensor([0.25, 2.0]))
    torch.testing.assert_close(weighted[:3], 0.25 * whole[:3])
    torch.testing.assert_close(weighted[3:], 2.0 * whole[3:])
    torch.testing.assert_close(gradient(torch.ones(2)), whole)


def metrics_of(run):
    return [json.loads(line) for line in (run / "arms" / "none" / "metrics.jsonl").read_text().splitlines()]


def recipe_with(buffer, **changes):
    changes = {"log__checkpoint_every": 2, "arms": {"none": {"method": "none"}}, **changes}
    return small_recipe(batches=8, buffer=buffer, **changes)


def test_a_run_draws_one_batch_for_two_and_resumes_to_the_same_numbers(tmp_path, monkeypatch):
    short_arms(monkeypatch)
    settings = {"capacity": 8, "reuse": 2, "pick": "freshness", "max_uses": 4}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(recipe_with(settings), whole)

    class Stopped(Exception):
        pass

    def stop(event):
        if event.kind == "update" and event.step == 7:
            raise Stopped

    with pytest.raises(Stopped):
        train(recipe_with(settings), cut, watch=stop)
    train(recipe_with(settings), cut, resume=True)
    a, b = metrics_of(whole), metrics_of(cut)
    changing = {f"throughput/{name}" for name in ("seconds", "tokens_per_s", "draw_seconds", "publish_seconds")}
    for x, y in zip(a, b, strict=True):
        assert {k: v for k, v in x.items() if k not in changing} == {k: v for k, v in y.items() if k not in changing}
    assert len(list((whole / "arms/none/rollouts").glob("*.parquet"))) == 4
    assert a[-1]["buffer/drawn_frac"] == 0.5
    assert [r["buffer/groups"] for r in a][:4] == [4, 4, 8, 8]
    assert [r["certificate/fresh"] for r in a][:2] == [True, False]
    assert a[1]["buffer/earlier_uses"] == 1
    assert {r["batch/tokens"] > 0 for r in a} == {True}


@pytest.mark.parametrize("capacity", [None, 8])
def test_a_cleared_buffer_trains_on_nothing_that_older_weights_drew(tmp_path, monkeypatch, capacity):
    """A queue of two batches, an engine that takes weights every third update: without clearing, lags reach four."""
    short_arms(monkeypatch)
    lags = {}
    for clear in (False, True):
        buffer = {"clear_at_sync": clear} | ({} if capacity is None else {"capacity": capacity})
        run = tmp_path / str(clear)
        train(recipe_with(buffer, lag={"sync_every": 3, "queue": 2}), run)
        lags[clear] = [r["version_lag/max"] for r in metrics_of(run)]
    assert lags[True] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert max(lags[False]) > 2


@pytest.mark.parametrize(
    ("buffer", "changes", "words"),
    [
        ({"reuse": 2}, {}, "buffer.reuse does nothing without a buffer"),
        ({"capacity": 3}, {}, "less than the 4 groups"),
        ({"capacity": 8}, {"rollout__evidence": "hidden"}, "a buffer mixes versions"),
        ({"capacity": 8, "max_age": 2}, {"lag": {"queue": 3}}, "may be 3 updates old when they arrive"),
        ({"capacity": 8, "tau": 10}, {}, 'buffer.tau does nothing with buffer.pick = "uniform"'),
    ],
)
def test_a_buffer_that_cannot_act_is_refused(buffer, changes, words):
    with pytest.raises(RecipeError, match=words):
        recipe_with(buffer, **changes)


@pytest.mark.parametrize(
    ("buffer", "changes", "limit"),
    [
        # Hidden states bring an output head per version.
        ({}, {"rollout__evidence": "hidden", "lag": {"sync_every": 2, "queue": 1}}, 60),
        ({"capacity": 12}, {"rollout__evidence": "sampled"}, 10),
    ],
)
def test_the_space_of_a_run_is_bounded_and_what_a_resume_needs_is_not_deleted(
    tmp_path, monkeypatch, buffer, changes, limit
):
    short_arms(monkeypatch)
    monkeypatch.setattr("offdrift_lab.train.loop.arm.MIB", 1024)
    run, whole = tmp_path / "run", tmp_path / "whole"
    sizes = []

    def space(folder):
        arm = folder / "arms" / "none"
        return sum(f.stat().st_size for d in ("rollouts", "log") for f in (arm / d).rglob("*") if f.is_file()) / 1024

    class Stopped(Exception):
        pass

    def stop(event):
        sizes.append(space(run))
        if event.kind == "update" and event.step == 7:
            raise Stopped

    limited = {**changes, "log__disk_mib": limit}
    with pytest.raises(Stopped):
        train(recipe_with(buffer, **limited), run, watch=stop)
    train(recipe_with(buffer, **limited), run, resume=True)
    train(recipe_with(buffer, **changes), whole)
    assert [r["optim/grad_norm"] for r in metrics_of(run)] == [r["optim/grad_norm"] for r in metrics_of(whole)]
    names = {f.name for f in (run / "arms/none/rollouts").glob("*.parquet")}
    assert "batch-000007.parquet" in names
    assert "batch-000000.parquet" not in names
    if not buffer:  # nothing had to stay
        assert space(run) <= limit < 0.6 * space(whole)
        assert max(sizes) < 1.5 * limit  # a batch and its head more, until it is trained on
