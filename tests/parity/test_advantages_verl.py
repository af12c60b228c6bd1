"""Every estimator of verl's registry, called in-process on the same batch in float64.

Where verl rounds to float32, or differs on purpose, a test asserts the difference and says why.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from offdrift.advantages import ADVANTAGES, advantages, returns_to_go
from tests.advantages.batches import Batch, random_batch
from tests.parity.peers import load_verl

OURS_ALONE = {"batch_mean", "dr_grpo", "opob", "rl_zvp"}
FLOAT32_IN_VERL = {"grpo_vectorized"}
"""Group mean and deviation are computed in float32 there, whatever the rewards' dtype."""

# Groups of 1 to 5 sequences in mixed order, and without the group of one.
GROUPS = [2, 0, 2, 5, 5, 5, 7, 7, 0, 2, 2, 2, 5, 3, 7, 7]
PAIRS = [2, 0, 2, 5, 5, 5, 7, 7, 0, 2, 2, 2, 5, 7, 7, 7]
WITHOUT_LONE = {"grpo_passk", "grpo", "gdpo"}
"""verl refuses a group of one, or takes its deviation as a float32 1 (see below)."""


@pytest.fixture(scope="module")
def verl():
    core_algos = load_verl().core_algos
    return SimpleNamespace(
        # offdrift is a plugin of verl and registers its own, too
        registry={n: f for n, f in core_algos.ADV_ESTIMATOR_REGISTRY.items() if not n.startswith("offdrift/")},
        config=core_algos.AlgoConfig(gamma=0.9, lam=0.8),
    )


def batch_for(how: str, seed: int) -> Batch:
    batch = random_batch(seed, PAIRS if how in WITHOUT_LONE else GROUPS, longest=14)
    if how == "gpg":
        rewarded(batch, 8)
    return batch


def rewarded(batch: Batch, count: int) -> None:
    """Leave rewards to that many of the 16 sequences: gpg's alpha is 16 / count."""
    rewards = batch.padded["rewards"]
    given = (rewards.sum(1) != 0).nonzero().squeeze(-1)
    rewards[given[count:]] = 0
    assert (rewards.sum(1) != 0).sum() == count


def theirs(verl, how: str, batch: Batch, rewards: Tensor | None = None, **options) -> Tensor:
    """verl's advantages at our tokens."""
    given = {
        "token_level_rewards": batch.padded["rewards"] if rewards is None else rewards,
        "response_mask": batch.mask,
    }
    if how == "gae":
        given |= {"values": batch.padded["values"], "gamma": 0.9, "lam": 0.8}
    else:
        given |= {"index": np.array([f"uid-{g}" for g in batch.groups.tolist()], dtype=object)}
        given |= {"config": verl.config}
    if how == "remax":
        given["reward_baselines"] = batch.per_sequence["greedy_rewards"]
    if how.endswith("optimal_token_baseline"):
        given |= {
            "old_log_probs": batch.padded["logp_old"],
            "sum_pi_squared": batch.padded["sum_pi_squared"],
            "rollout_is_weights": batch.padded["weight"] / of_order_one(batch),
        }
    if how == "gdpo":
        given["config"] = None  # else it wants the reward manager's dictionaries
    found, _ = verl.registry[how](**{**given, **options})
    return batch.pack(found)


def of_order_one(batch: Batch) -> Tensor:
    """Each group's largest weight where it is below 1, else 1: what we divide weights by."""
    largest = batch.padded["weight"].amax(1)
    most = torch.stack([largest[batch.groups == g].max() for g in batch.groups])
    return most.clamp(max=1.0).where(most > 0, 1.0)[:, None]


def ours(how: str, batch: Batch, rewards: Tensor | None = None, **options) -> Tensor:
    token_rewards = batch.pack(batch.padded["rewards"] if rewards is None else rewards)
    inputs = batch.inputs(how)
    if how == "gdpo":  # verl's components without dictionaries: the rewards themselves
        inputs = {"components": batch.segments.sum(token_rewards)[:, None]}
    return advantages(token_rewards, batch.segments, how=how, **{**inputs, **options})


def test_the_table_has_every_name_of_the_registry(verl):
    assert len(verl.registry) == 14
    assert set(ADVANTAGES) == set(verl.registry) | OURS_ALONE


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("how", sorted(set(ADVANTAGES) - OURS_ALONE))
def test_estimator_equals_verl(verl, how, seed):
    batch = batch_for(how, seed)
    got, expected = ours(how, batch), theirs(verl, how, batch)
    assert len(got) > 40
    assert expected.dtype == torch.float64
    atol = 1e-5 if how in FLOAT32_IN_VERL else 1e-9
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("seed", range(3))
def test_dr_grpo_equals_verl_without_its_deviation(verl, seed):
    batch = batch_for("grpo", seed)
    expected = theirs(verl, "grpo", batch, norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(ours("dr_grpo", batch), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_token_baselines_without_weights_equal_verl(verl, how, seed):
    batch = batch_for(how, seed)
    expected = theirs(verl, how, batch, rollout_is_weights=None)
    torch.testing.assert_close(ours(how, batch, weight=None), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_returns_carried_across_masked_tokens_equal_verl(verl, gamma):
    batch = batch_for("reinforce_plus_plus", 9)
    _, returns = verl.registry["reinforce_plus_plus"](
        token_level_rewards=batch.padded["rewards"], response_mask=batch.mask, config=SimpleNamespace(gamma=gamma)
    )
    gaps = batch.mask.diff(dim=1) > 0
    assert gaps.sum() > 5, "masks must have gaps inside a response"
    got = returns_to_go(batch.pack(batch.padded["rewards"]), batch.segments, gamma=gamma)
    torch.testing.assert_close(got, batch.pack(returns), rtol=0, atol=1e-9)


# -- where verl differs, and why ------------------------------------------------------------------


@pytest.mark.parametrize("how", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_small_weights_lose_their_baseline_to_an_epsilon_in_verl(verl, how):
    """It is a weighted mean, so weights of 1e-5 should do what weights of 1 do."""
    batch = batch_for(how, 0)
    batch.padded["weight"] = batch.padded["weight"] / of_order_one(batch)
    plain, without = ours(how, batch), ours(how, batch, weight=torch.zeros(len(batch.pack(batch.mask))).double())
    batch.padded["weight"] = 1e-5 * batch.padded["weight"]
    torch.testing.assert_close(ours(how, batch), plain, rtol=0, atol=1e-7)
    given = {"rollout_is_weights": batch.padded["weight"]}
    assert (theirs(verl, how, batch, **given) - without).abs().max() < 0.1
    assert (plain - without).abs().max() > 0.5


def test_grpo_vectorized_rounds_to_float32_in_verl(verl):
    batch = batch_for("grpo_vectorized", 0)
    apart = (ours("grpo_vectorized", batch) - theirs(verl, "grpo_vectorized", batch)).abs().max()
    assert 1e-9 < apart < 1e-5


@pytest.mark.parametrize("how", ["grpo", "gdpo"])
def test_the_deviation_of_a_lone_sequence_is_a_float32_one_in_verl(verl, how):
    # torch.tensor(1.0) + 1e-6 is 1 + 8 * 2^-23 in float32.
    batch = random_batch(0, GROUPS, longest=14, empty=0)
    got, expected = ours(how, batch), theirs(verl, how, batch)
    lone = batch.segments.spread(batch.groups == 3)
    assert lone.sum() > 2
    apart = (got - expected).abs()
    assert apart[lone].max() > 1e-9
    if how == "grpo":  # gdpo's whitening spreads it over the batch
        assert apart[~lone].max() < 1e-9
        torch.testing.assert_close(got[lone] * (1 + 1e-6), expected[lone] * (1 + 8 * 2**-23), rtol=0, atol=1e-12)
    assert apart.max() < 1e-6


def test_gpg_rounds_its_scale_to_float32_in_verl(verl):
    # 4/3 is an integer divided by an integer tensor, which torch makes float32.
    batch = random_batch(1, GROUPS, empty=0)
    rewarded(batch, 12)
    got, expected = ours("gpg", batch), theirs(verl, "gpg", batch)
    assert (got - expected).abs().max() > 1e-9
    exactly = expected * (4 / 3) / (torch.tensor(16) / torch.tensor(12)).double()
    torch.testing.assert_close(got, exactly, rtol=0, atol=1e-12)


def test_gdpo_rounds_components_to_float32_in_verl(verl):
    batch = random_batch(2, GROUPS, empty=0)
    parts = batch.per_sequence["components"]

    class Config(dict):
        """What verl reads of its configuration."""

    config = Config(gdpo_reward_keys=["first", "second"], gdpo_reward_weights=[1.0, 0.5])
    found, _ = verl.registry["gdpo"](
        token_level_rewards=batch.padded["rewards"],
        response_mask=batch.mask,
        index=batch.groups.numpy(),
        config=config,
        non_tensor_batch={"first": parts[:, 0].numpy(), "second": parts[:, 1].numpy()},
        # An empty prompt before a response without padding: the reward lies on the last column.
        batch={"prompts": torch.zeros(16, 0), "attention_mask": torch.ones_like(batch.mask).long()},
    )
    got = ours("gdpo", batch, components=parts, component_weights=torch.tensor([1.0, 0.5]).double())
    apart = (got - batch.pack(found)).abs().max()
    assert 1e-9 < apart < 1e-5


def test_whitening_one_token_is_an_error_in_verl_and_zero_here(verl):
    batch = random_batch(3, GROUPS)
    mask = torch.zeros_like(batch.mask)
    mask[0, 0] = 1
    one = Batch(mask, batch.groups, batch.padded, batch.per_sequence)
    with pytest.raises(ValueError, match="sum of the mask is one"):
        theirs(verl, "gae", one)
    assert ours("gae", one, position=None).tolist() == [0.0]


def test_whitening_divides_by_the_tokens_plus_epsilon_in_verl(verl):
    # Its masked mean is sum / (n + 1e-8): here 3 tokens, mean 1e4, off by 1e4 * 1e-8 / 3.
    batch = random_batch(4, GROUPS)
    mask = torch.zeros_like(batch.mask)
    mask[0, :3] = 1
    few = Batch(mask, batch.groups, batch.padded, batch.per_sequence)
    rewards = torch.zeros_like(batch.padded["rewards"])
    rewards[0, :3] = torch.tensor([-1.0, 2.0, 1e4]).double()  # returns 10001, 10002, 10000
    got = advantages(few.pack(rewards), few.segments, how="reinforce_plus_plus")
    expected = theirs(verl, "reinforce_plus_plus", few, rewards, config=SimpleNamespace(gamma=1.0))
    assert got.sum().abs() < 1e-9
    torch.testing.assert_close(expected - got, torch.full((3,), 10001 * 1e-8 / 3).double(), rtol=1e-3, atol=0)


def test_best_of_one_is_an_error_on_both_sides(verl):
    batch = random_batch(5, GROUPS)
    with pytest.raises(ValueError, match="at least 2 samples"):
        theirs(verl, "grpo_passk", batch)
    with pytest.raises(ValueError, match="group 3 has one sequence"):
        ours("grpo_passk", batch)
