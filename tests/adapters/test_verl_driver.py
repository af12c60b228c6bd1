"""The driver's side of the real verl with our correction installed: its module, its trainers' calls."""

import itertools
import logging
import math
import sys
import types
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pytest
import torch

from offdrift.adapters import verl as plugin
from offdrift.adapters.verl import losses as verl_losses
from offdrift.adapters.verl import proof as verl_proof
from offdrift.adapters.verl.driver import SKIPPED, Driver, advantage_named, estimator_names, logged
from offdrift.adapters.verl.losses import driver_share
from offdrift.errors import BadValueError, EvidenceError, FrameworkError, LivenessError, MethodError, RecipeError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS
from tests.adapters.verl_run import GARBAGE, proto, pushed, real_verl
from tests.adapters.verl_run import config as actor_config
from tests.parity.peers import Batch, random_batch, same, verl_correction
from tests.records.samples import read_all

OFF = {"rollout_is": None, "rollout_rs": None}
METRICS_ALONE = {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_rs": None}


@pytest.fixture
def helper():
    """verl's helper module; whatever a test installs is taken out again."""
    yield real_verl().rollout_corr_helper
    plugin.uninstall()


def corrected(helper, batch: Batch, block, **more):
    """Weights, mask and metrics that the installed correction wrote into verl's batch."""
    data, metrics = helper.compute_rollout_correction_and_add_to_batch(proto(batch, **more), block)
    return data.batch.get("rollout_is_weights", None), data.batch["response_mask"], metrics


def test_install_replaces_verls_function_wherever_it_is_bound_and_uninstall_restores(helper):
    name = "compute_rollout_correction_and_add_to_batch"
    original = getattr(helper, name)
    other = types.ModuleType("my_trainer")
    setattr(other, name, original)
    sys.modules["my_trainer"] = other
    try:
        plugin.install("icepop")
        ours = getattr(helper, name)
        assert ours is not original
        assert getattr(other, name) is ours
        plugin.install("token_veto")  # replaces the first
        assert getattr(helper, name).__wrapped__ is original
        plugin.uninstall()
        plugin.uninstall()
        assert getattr(helper, name) is getattr(other, name) is original
    finally:
        del sys.modules["my_trainer"]


def test_install_says_what_it_does_and_a_block_that_contradicts_is_refused(helper, caplog):
    with caplog.at_level(logging.INFO, "offdrift.verl"):
        plugin.install("icepop")
    assert "weight token ratio(mismatch), mask below 0.5, mask above 5" in caplog.text
    with pytest.raises(MethodError, match="two corrections"):
        corrected(helper, random_batch(0), {"rollout_is": "token"})
    plugin.install()
    with pytest.raises(RecipeError, match="did you mean 'rollout_is_threshold'"):
        corrected(helper, random_batch(0), {"rollout_is_treshold": 3.0})


def test_settings_that_would_not_reach_the_workers_are_refused(helper, monkeypatch):
    """The loss runs elsewhere: what it is made of must stand in the environment of all processes."""
    changes = {"objective.eps_low": 0.5}
    with pytest.raises(MethodError, match=r"OFFDRIFT_SETTINGS=objective.eps_low=0.5 for all"):
        plugin.install("decoupled_token_is", settings=changes)
    plugin.install("decoupled_token_is", settings={"weight.cap": 3.0})
    monkeypatch.setenv("OFFDRIFT_SETTINGS", "objective.eps_low=0.5")
    verl_losses.configured.cache_clear()
    plugin.install("decoupled_token_is", settings=changes)
    verl_losses.configured.cache_clear()


BLOCKS = [
    {"rollout_is": "token"},
    {"rollout_is": "sequence", "rollout_is_threshold": 3.0},
    {"rollout_is": "token", "rollout_is_threshold": "0.6_5.0"},
    {"rollout_is": "token", "rollout_is_batch_normalize": True},
    {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"},
    {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.3"},
    {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 1.5},
    {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    {"rollout_rs": "seq_max_k2,token_k3", "rollout_rs_threshold": "0.5,0.02"},
    {"rollout_is": "sequence", "rollout_rs": "seq_sum_k2", "rollout_rs_threshold": 0.5},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_verls_block_keeps_and_weights_what_verl_keeps_and_weights(helper, block, seed):
    batch = random_batch(seed, sequences=24)
    theirs = {"rollout_is": None, "rollout_is_threshold": 2.0} | block
    weights, mask, _ = verl_correction(real_verl(), batch, **theirs)
    plugin.install()
    mine, kept_mask, metrics = corrected(helper, batch, block)
    expected = mask.double() if weights is None else weights * mask
    same(mine, expected)
    assert torch.equal(kept_mask, batch.mask)
    assert 0 < int((mine != 0).sum()) <= batch.tokens
    assert metrics["offdrift/batch/tokens"] == batch.tokens


def test_a_row_leaves_its_share_and_metrics_do_not_depend_on_it(helper):
    batch, seen = random_batch(3), []
    for name in ("icepop", "geo_mask", "decoupled_token_is"):
        plugin.install(name)
        weights, _, metrics = corrected(helper, batch, METRICS_ALONE)
        decided = driver_share(METHODS[name])(batch.pack())
        same(weights, batch.pack().unpack(decided.weight.where(decided.keep, 0.0)))
        seen.append({k: v for k, v in metrics.items() if "/mismatch/" in k})
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 20
    plugin.install()  # metrics alone
    weights, mask, metrics = corrected(helper, random_batch(0), METRICS_ALONE)
    assert weights is None
    assert torch.equal(mask, random_batch(0).mask)
    assert metrics["offdrift/mismatch/k3"] > 0


@pytest.mark.parametrize("name", ["icepop", "geo_mask", "tbpo", "tic_filter", "decoupled_seq_is_rs"])
def test_padding_and_order_do_not_matter(helper, name):
    batch, order = random_batch(5), torch.randperm(14, generator=torch.Generator().manual_seed(3))
    garbage = torch.tensor(GARBAGE).double()[torch.arange(batch.width) % 4]
    dirty = {
        f: getattr(batch, f).where(batch.mask.bool(), garbage)[order]
        for f in ("rollout", "old", "logp", "ref", "advantages")
    }
    plugin.install(name)
    weights, _, metrics = corrected(helper, batch, OFF)
    plugin.install(name)
    moved, _, again = corrected(helper, Batch(**dirty, mask=batch.mask[order]), OFF)
    same(moved, weights[order])
    assert metrics.keys() == again.keys()
    for key, value in metrics.items():
        assert again[key] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), key
    assert int((weights == 0).sum()) >= int((batch.mask == 0).sum())


def test_a_batch_without_a_token_is_weightless_and_silent(helper):
    batch = replace(random_batch(0), mask=torch.zeros_like(random_batch(0).mask))
    plugin.install("icepop")
    weights, _, metrics = corrected(helper, batch, OFF)
    assert not bool(weights.any())
    assert metrics == {}
    plugin.uninstall()
    with pytest.raises(ValueError, match="at least one valid token"):  # verl's own stops here
        corrected(helper, batch, {"rollout_is": "token"})


@pytest.mark.parametrize("value", [-9999.0, -math.inf])
def test_tokens_that_the_engine_did_not_score_weigh_nothing(helper, value):
    """And nothing else changes: a token's weight is its own, and verl's denominators are as they were."""
    batch = random_batch(0, far=False)
    some = (torch.arange(batch.width) % 4 == 1).expand(batch.mask.shape) & (batch.mask > 0)
    assert 3 < int(some.sum()) < batch.tokens
    plugin.install("icepop")
    whole, mask, _ = corrected(helper, batch, OFF)
    rollout = batch.rollout.masked_fill(some, value)
    weights, its, metrics = corrected(helper, replace(batch, rollout=rollout), OFF)
    assert torch.equal(its, mask)
    assert torch.equal(weights, whole.masked_fill(some, 0.0))
    assert all(math.isfinite(x) for x in metrics.values())


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", ["vanilla", "gspo", "offdrift/geo_mask"])
def test_everything_rejected_is_a_step_of_zero_and_verls_own_is_nan(helper, loss, how):
    """Through verl's loss, with the counts that its engine takes from the mask it is left with."""
    batch = random_batch(2, far=False)
    batch = replace(batch, old=(batch.rollout - 3.0))
    block = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99_1.01"}
    own, _ = helper.compute_rollout_correction_and_add_to_batch(proto(batch), block)
    assert not bool(own.batch["response_mask"].any())
    plugin.install()
    weights, mask, metrics = corrected(helper, batch, block)
    assert metrics["offdrift/gate/acceptance_seq"] == 0
    cfg = actor_config(loss, how)
    value, gradient, _ = pushed(cfg, batch, weights=weights, tokens=int(mask.sum()), sequences=14)
    assert float(value) == 0
    assert int(gradient.count_nonzero()) == 0
    left = replace(batch, mask=own.batch["response_mask"])
    if how == "token-mean" and loss == "vanilla":
        theirs = pushed(actor_config("vanilla"), left, tokens=0, sequences=14)[0]
        assert math.isnan(float(theirs))


def test_a_rejected_sequence_stays_in_every_denominator_of_verl(helper):
    """verl's v0 engine counts the tokens of the edited mask: its step grows as more is rejected."""
    batch = random_batch(7, sequences=30, far=False)
    block = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    own, _ = helper.compute_rollout_correction_and_add_to_batch(proto(batch), block)
    edited = own.batch["response_mask"]
    theirs = pushed(actor_config("vanilla"), replace(batch, mask=edited), tokens=int(edited.sum()))[1]
    plugin.install()
    weights, mask, _ = corrected(helper, batch, block)
    mine = pushed(actor_config("vanilla"), batch, weights=weights, tokens=int(mask.sum()))[1]
    assert 0 < int(edited.sum()) < batch.tokens
    same(mine * batch.tokens, theirs * int(edited.sum()))
    assert int(mine.count_nonzero()) > 20


WITHOUT = {"geo_mean"}
"""verl's losses to which a weight of 0 on a token is not a rejection of that token."""


def test_which_of_verls_losses_a_weight_of_zero_rejects_in():
    """`geo_mean` takes the geometric mean of a sequence's weights; the others multiply by token."""
    batch = random_batch(1, far=False, per_token=False)
    weights = torch.ones_like(batch.old) * batch.mask
    weights[:, ::2] = 0
    fields = {"dro_beta": 1.0, "clip_cov_ratio": 0.1, "kl_cov_ratio": 0.1, "ppo_kl_coef": 0.0}
    fields |= {"clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    tried = set()
    for name in real_verl().core_algos.POLICY_LOSS_REGISTRY:
        if name.startswith("offdrift/") or name == "bypass_mode":
            continue
        cfg = actor_config(name)
        object.__setattr__(cfg, "policy_loss", real_verl().OmegaConf.create({**fields, "loss_mode": name}))
        gradient = pushed(cfg, batch, weights=weights, tokens=batch.tokens, sequences=14)[1]
        assert bool(gradient[:, ::2].any()) == (name in WITHOUT), name
        assert int(gradient[:, 1::2].count_nonzero()) > 10
        tried.add(name)
    assert {"vanilla", "gspo", "sapo", "gpg", "cispo", "geo_mean"} <= tried
    assert version("verl") < "0.9" or (len(tried) == 11 and "dro" in tried)


def test_the_driver_proves_itself_and_refuses_weights_that_it_does_not_know(helper, monkeypatch, caplog):
    monkeypatch.setattr(verl_proof, "PROVED", set())
    plugin.install("icepop")
    with caplog.at_level(logging.INFO, "offdrift.verl"):
        corrected(helper, random_batch(0), OFF)
    assert "compute_rollout_correction_and_add_to_batch: loss" in caplog.text
    plugin.uninstall()
    inverse = helper.compute_rollout_correction_weights
    monkeypatch.setattr(helper, "compute_rollout_correction_weights", lambda log_ratio, **x: inverse(-log_ratio, **x))
    verl_proof.PROVED.clear()
    plugin.install("icepop")
    with pytest.raises(FrameworkError, match="compute_rollout_correction_and_add_to_batch is a loss that"):
        corrected(helper, random_batch(0), OFF)


def test_a_log_prob_that_no_policy_produces_is_named(helper):
    batch = random_batch(0)
    batch.rollout[0, 4] = math.nan
    plugin.install("icepop")
    with pytest.raises(BadValueError, match="logp_rollout of sequence 0 is nan at trainable token 4"):
        corrected(helper, batch, OFF)


def test_a_share_that_needs_advantages_is_refused_at_install():
    signed = replace(METHODS["icepop_binary"].correction.gates[0], advantage="negative")
    row = METHODS["icepop_binary"]
    row = replace(row, correction=replace(row.correction, gates=(signed,)))
    with pytest.raises(MethodError, match="before it has advantages"):
        plugin.install(row)


def test_liveness_is_said_at_the_first_step_and_copies_are_an_error(helper, caplog):
    plugin.install("icepop")
    with caplog.at_level(logging.INFO, "offdrift.verl"):
        for _ in range(2):
            corrected(helper, random_batch(0), OFF)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("weight [")]
    assert len(lines) == 1
    assert "acted" in lines[0]
    assert "tokens changed" in lines[0]
    copies = replace(random_batch(0), old=random_batch(0).rollout)
    plugin.install("icepop")
    with pytest.raises(LivenessError, match="equal at every token"):
        corrected(helper, copies, OFF)
    plugin.install("icepop", on_idle="warn")
    assert corrected(helper, copies, OFF)[0] is not None


def algorithm(**block):
    return real_verl().OmegaConf.create({"gamma": 1.0, "rollout_correction": block or None})


def estimated(driver: Driver, data, name="grpo", config=None):
    """What verl's `compute_advantage` is replaced by, around an estimator that does nothing."""
    return driver.advantages(lambda data, name, **_: data, data, name, 1.0, config=config)


def test_a_correction_that_verl_does_not_call_is_an_error():
    data = proto(random_batch(0))
    del data.batch["rollout_log_probs"]
    with pytest.raises(LivenessError, match="calculate_log_probs=true"):
        estimated(Driver("icepop"), data, config=algorithm())
    with pytest.raises(LivenessError, match="calculate_log_probs=true"):
        estimated(Driver(), data, config=algorithm(rollout_is="token"))
    with pytest.raises(LivenessError, match="bypass_mode=false"):
        estimated(Driver("icepop"), proto(random_batch(0)), config=algorithm(bypass_mode=True))
    estimated(Driver("icepop", on_idle="warn"), data, config=algorithm())
    estimated(Driver(), data, config=algorithm(rollout_is=None))
    called = Driver("icepop")
    called.correct(proto(random_batch(0)), OFF)
    estimated(called, data, config=algorithm())
    with pytest.raises(LivenessError, match="was never called"):  # not since the last batch
        estimated(called, data, config=algorithm())


@pytest.mark.parametrize(("mode", "read"), [("vanilla", False), ("bypass_mode", True), ("offdrift/bypass_pg_is", True)])
def test_a_block_that_the_loss_does_not_read_in_bypass_mode_is_an_error(mode, read):
    """verl's v1 trainer leaves `loss_mode` as it is; only "bypass_mode" looks at the block."""
    block = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01, "bypass_mode": True, "loss_type": "reinforce"}
    actor = {"actor": {"policy_loss": {"loss_mode": mode}}}
    root = real_verl().OmegaConf.create({"algorithm": {"rollout_correction": block}, "actor_rollout_ref": actor})
    data = proto(random_batch(0))
    if read:
        estimated(Driver(), data, config=root.algorithm)
    else:
        with pytest.raises(LivenessError, match="loss_mode='vanilla' does not read it"):
            estimated(Driver(), data, config=root.algorithm)


def test_bypass_mode_leaves_a_loss_of_ours_in_place(helper):
    verl = real_verl()
    block = verl.OmegaConf.create({"bypass_mode": True})
    lefts = {"offdrift/trm_max_k2": "offdrift/trm_max_k2", "vanilla": "bypass_mode"}
    for installed, (chosen, left) in itertools.product((False, True), lefts.items()):
        if installed:
            plugin.install()
        policy_loss, data = verl.OmegaConf.create({"loss_mode": chosen}), proto(random_batch(0))
        helper.apply_bypass_mode(data, block, policy_loss)
        assert policy_loss.loss_mode == left
        assert policy_loss.rollout_correction.bypass_mode
        assert torch.equal(data.batch["old_log_probs"], data.batch["rollout_log_probs"])
        plugin.uninstall()


OWN = ["grpo", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"]
OWN += ["reinforce_plus_plus_baseline", "reinforce_plus_plus"]


def rewarded(seed: int = 0):
    """Rewards on last tokens, holes in no mask, three or four sequences to a prompt."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (14, 1), generator=g)
    mask = (torch.arange(9) < lengths).long()
    rewards = torch.zeros(14, 9, dtype=torch.float64)
    rewards[torch.arange(14), lengths[:, 0] - 1] = torch.randint(0, 4, (14,), generator=g).double()
    return rewards, mask, np.array([f"u{i % 4}" for i in range(14)], dtype=object)


def test_estimators_are_registered_each_with_two_baselines():
    registry = real_verl().core_algos.ADV_ESTIMATOR_REGISTRY
    ours = {n.removeprefix("offdrift/") for n in registry if n.startswith("offdrift/")}
    assert ours == set(estimator_names())
    assert {"dr_grpo", "dr_grpo/kept", "opob", "opob/kept"} <= ours
    assert len(ours) == 30
    assert set(SKIPPED) == {"gae", "gdpo", "rl_zvp"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OWN)
def test_estimators_are_verls_where_verl_has_them(name, seed):
    rewards, mask, uids = rewarded(seed)
    verl = real_verl()
    config = verl.OmegaConf.create({"gamma": 1.0, "norm_adv_by_std_in_grpo": True})
    kwargs = {"token_level_rewards": rewards, "response_mask": mask, "index": uids, "config": config}
    registry = verl.core_algos.ADV_ESTIMATOR_REGISTRY
    ours = registry[f"offdrift/{name}"](**kwargs)[0]
    theirs = registry[name](**{**kwargs, "token_level_rewards": rewards.clone()})[0]
    torch.testing.assert_close(ours * mask, theirs * mask, rtol=1e-6, atol=2e-6)
    assert int(ours.count_nonzero()) > 4


def test_the_baseline_excludes_rejected_siblings_if_asked():
    """dr_grpo: 4 sequences to a prompt, one rejected; means of 4 and of 3 rewards."""
    rewards = torch.zeros(4, 2)
    rewards[:, 1] = torch.tensor([1.0, 0.0, 0.0, 7.0])
    mask, uids = torch.ones(4, 2, dtype=torch.int64), np.array(["u"] * 4, dtype=object)
    weights = torch.tensor([[1.0, 2.0], [1.0, 0.0], [0.5, 0.5], [0.0, 0.0]])
    args = {"token_level_rewards": rewards, "response_mask": mask, "index": uids}
    everyone = advantage_named("dr_grpo")(**args, rollout_is_weights=weights)[0]
    kept = advantage_named("dr_grpo/kept")(**args, rollout_is_weights=weights)[0]
    assert everyone[:, 0].tolist() == [-1.0, -2.0, -2.0, 5.0]
    torch.testing.assert_close(kept[:3, 0], torch.tensor([2 / 3, -1 / 3, -1 / 3]))
    masked = mask.clone()
    masked[3] = 0  # verl's own correction edits the mask
    same_kept = advantage_named("dr_grpo/kept")(rewards, masked, uids)[0]
    torch.testing.assert_close(same_kept[:3], kept[:3])


def test_installed_estimators_see_the_whole_batch():
    """`remax` and the token baselines need fields that verl passes to its own names alone."""
    rewards, mask, uids = rewarded(1)
    verl = real_verl()
    more = {
        "token_level_rewards": rewards,
        "reward_baselines": torch.ones(14).double(),
        "old_log_probs": -torch.ones(14, 9).double(),
        "sum_pi_squared": torch.full((14, 9), 0.3).double(),
    }
    for name in ("remax", "optimal_token_baseline", "opob"):
        data = verl.DataProto.from_dict(tensors={"response_mask": mask, **more}, non_tensors={"uid": uids})
        data = estimated(Driver(), data, f"offdrift/{name}")
        assert int(data.batch["advantages"].count_nonzero()) > 20
    with pytest.raises(EvidenceError, match="sum_pi_squared"):
        advantage_named("optimal_token_baseline")(rewards, mask, uids, old_log_probs=more["old_log_probs"])
    with pytest.raises(EvidenceError, match="uid"):
        advantage_named("rloo")(rewards, mask)


@pytest.mark.parametrize("name", ["grpo", "rloo/kept", "reinforce_plus_plus", "opo", "gpg/kept"])
def test_advantages_ignore_padding_and_follow_the_rows(name):
    rewards, mask, uids = rewarded(2)
    dirty = rewards.where(mask.bool(), math.nan)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    clean = advantage_named(name)(rewards, mask, uids)[0]
    moved = advantage_named(name)(dirty[order], mask[order], uids[order.numpy()])[0]
    torch.testing.assert_close(moved, clean[order], rtol=1e-12, atol=1e-12)
    assert int(clean.count_nonzero()) > 20


def test_what_is_recorded_is_what_was_sampled(tmp_path, helper):
    """Tokens, both log-probs, advantages, versions and groups of all tokens, rejected or not."""
    batch = random_batch(3)
    tokens = torch.arange(batch.mask.numel()).reshape(batch.mask.shape)
    uids = np.array([f"u{i // 2}" for i in range(14)], dtype=object)
    plugin.install("geo_mask", record=tmp_path)
    driver = plugin._STATE["driver"]
    for step in (5, 6):
        data = proto(batch, responses=tokens, advantages=batch.advantages, token_level_scores=batch.mask.double())
        data.non_tensor_batch["uid"] = uids
        data.meta_info["global_steps"] = step
        data, _ = helper.compute_rollout_correction_and_add_to_batch(data, OFF)
        assert bool((data.batch["rollout_is_weights"] == 0)[batch.mask.bool()].any())
        estimated(driver, data, config=algorithm())
    plugin.uninstall()
    _, found, bad = read_all(tmp_path)
    assert not bad
    steps = torch.cat([b.step for b in found])
    assert steps.tolist() == [5] * 14 + [6] * 14
    kept = batch.mask.bool()
    names = ("tokens", "logp_rollout", "logp_old", "advantages")
    for field, expected in zip(names, (tokens, batch.rollout, batch.old, batch.advantages), strict=True):
        got = torch.cat([getattr(b, field) for b in found]).double()
        torch.testing.assert_close(got, expected[kept].double().repeat(2), rtol=1e-6, atol=1e-6)
    assert sum(b.num_tokens for b in found) == 2 * batch.tokens


def test_versions_groups_and_what_was_not_scored():
    batch = random_batch(4)
    broken = batch.rollout.clone()
    broken[0, 2] = math.nan
    tensors = {"response_mask": batch.mask, "rollout_log_probs": broken, "old_log_probs": batch.old}
    tensors["rm_scores"] = batch.mask.double()
    drawn_at = torch.arange(14) % 3 + 5
    record = logged(tensors, ["b", "a"] * 7, step=9, version=8, rollout_version=drawn_at)
    assert record.num_tokens == batch.tokens - 1
    assert record.unscored["log-probs/missing"].tolist() == [1] + [0] * 13
    assert int(record.trainable.sum()) == batch.tokens
    assert record.group_ids.tolist() == [1, 0] * 7
    assert record.lag.tolist() == (8 - (record.segments.seq_ids % 3 + 5)).tolist()
    assert record.position.tolist() == [c for r, c in batch.mask.nonzero().tolist() if (r, c) != (0, 2)]
    assert record.rewards.tolist() == batch.mask.sum(-1).tolist()


def test_a_record_before_the_first_correction_does_not_replace_it(tmp_path):
    """As after a batch without log-probs of the engine, with on_idle="warn"."""
    batch = random_batch(3)
    driver = Driver("icepop", record=tmp_path, on_idle="warn")
    driver.record({"response_mask": batch.mask, "old_log_probs": batch.old}, None, step=1)
    data, metrics = driver.correct(proto(batch), OFF)
    driver.close()
    expected = driver_share(METHODS["icepop"])(batch.pack())
    same(data.batch["rollout_is_weights"], batch.pack().unpack(expected.weight))
    assert metrics["offdrift/weight/max"] != 1
    assert len(list(tmp_path.glob("*.parquet"))) == 1


def test_weights_are_not_rounded_to_the_dtype_of_the_log_probs():
    """bfloat16 has eight bits: a weight of 1.001 would be 1."""
    batch = random_batch(3)
    low = replace(batch, old=batch.old.bfloat16(), rollout=batch.old.bfloat16() - 1 / 64)
    data, _ = Driver("decoupled_token_is").correct(proto(low), OFF)
    weights = data.batch["rollout_is_weights"]
    assert weights.dtype == torch.float32
    # What verl's driver has: a current policy in float64 beside them would make all of it float64.
    packed = LogProbs.pack(low.rollout, None, low.old, mask=low.mask)
    expected = driver_share(METHODS["decoupled_token_is"])(packed).weight
    assert torch.equal(weights[batch.mask.bool()], expected)
    assert not torch.equal(expected, expected.bfloat16().float())
