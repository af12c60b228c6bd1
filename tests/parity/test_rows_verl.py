"""verl's policy losses, called in-process, against the rows that they are or can be set to.

Normalizers are the counts of everything sampled on both sides; masks are of integers, as in verl's
trainer (see `test_gates_verl` for what a mask of floats does). Losses without a row are in
`test_losses_verl`.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offdrift.correction import Weight, rejection
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, override
from offdrift.objectives import Clipped
from offdrift.stats.metrics import summarize
from tests.parity.peers import MODES, Batch, actor, agree, differ, one_sequence, ours, random_batch, same, verl_loss

SEEDS = range(3)
NEVER = 1e9
"""verl's dual clip cannot be switched off; no ratio reaches this one (e^20 is 4.9e8)."""
NONE = 1e-12
"""verl's band of weights needs a lower end; no weight is below this one (e^-20 is 2e-9)."""


def clipped_as(config) -> Clipped:
    """The objective with the numbers of verl's configuration."""
    c = config.clip_ratio_c
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return Clipped(eps_low=low, eps_high=high, dual_clip=None if c == NEVER else c)


def weight_as(on: str, unit: str, threshold, normalize: bool = False) -> Weight:
    """The weight with the limits of verl's threshold."""
    ends = [float(x) for x in str(threshold).split("_")]
    band = {} if len(ends) == 1 else {"outside": "mask"}
    if band and ends[0] != NONE:
        band["floor"] = ends[0]
    cap = None if ends[-1] == NEVER else ends[-1]
    return Weight(on=on, unit=unit, cap=cap, normalize=normalize, **band)


def weights_of(verl, batch: Batch, unit: str, threshold) -> Tensor:
    """verl's importance weights of the mismatch."""
    return verl.rollout_corr_helper.compute_rollout_correction_weights(
        batch.old - batch.rollout, batch.mask, rollout_is=unit, rollout_is_threshold=threshold
    )[0]


def bypass(verl, batch: Batch, how: str, **correction) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the bypass loss under a rollout correction."""
    config = verl.RolloutCorrectionConfig(bypass_mode=True, **correction)
    fields = actor(verl, batch, policy_loss={"rollout_correction": config})
    return verl_loss(verl, "bypass_mode", batch.bypass, fields, how)


# -- rows that are one of verl's losses -----------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["none", "gpg"])
def test_score_function(verl, name, seed):
    """The rollout policy plays no part: one log-prob is enough."""
    batch = random_batch(seed)
    row = METHODS[name]
    agree(ours(row, batch), *verl_loss(verl, "gpg", batch, actor(verl, batch), "token-mean"))
    agree(ours(row, batch), *bypass(verl, batch, "token-mean", loss_type="reinforce", rollout_is=None))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.3), (1.0, 4.0)])
def test_cispo(verl, low, high, seed):
    batch = random_batch(seed)
    row = override(METHODS["cispo"], {"weight.floor": 1 - low, "weight.cap": 1 + high})
    config = actor(verl, batch, clip_ratio_low=low, clip_ratio_high=high)
    agree(ours(row, batch), *verl_loss(verl, "cispo", batch, config, "token-mean"))


def test_cispo_as_published_here_is_verls_default(verl):
    batch = random_batch(9)
    theirs = verl_loss(verl, "cispo", batch, actor(verl, batch), "token-mean")
    for name in ("cispo", "minimax_m1"):
        agree(ours(METHODS[name], batch), *theirs)
    differ(ours(METHODS["cispo_upper"], batch).gradient, theirs[1])  # dis.13: a cap alone, at 5


DPPO = {"dppo_tv": 0.15, "dppo_kl": 0.05}
NEAR = {"dppo_tv": False, "dppo_kl": True}
"""Whether the batch may have log-ratios beyond 20 nats, see the token made by hand below."""
STALE = {"gate.on": "staleness", "weight.on": "staleness"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", DPPO)
def test_dppo_on_verls_anchor(verl, name, seed):
    """dis.10: verl anchors in the old policy; its ratio is cut at 3, its field's default."""
    batch, limit = random_batch(seed, far=NEAR[name]), DPPO[name]
    config = actor(verl, batch, clip_ratio_low=limit, clip_ratio_high=limit, loss_scale_factor=31)
    loss, gradient = verl_loss(verl, name, batch, config, MODES["fixed"])
    row = override(METHODS[name], {**STALE, "weight.cap": 3.0})
    (gate,) = row.correction.gates
    assert (gate.low, gate.high) == (-limit, limit)
    assert METHODS[name].correction.weights == (Weight(on="full", cap=20.0),)
    mine = ours(row, batch, horizon=31)
    agree(mine, loss, gradient)
    assert 0 < int(mine.keep.sum()) < batch.tokens
    differ(ours(METHODS[name], batch, horizon=31).gradient, gradient)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", DPPO)
@pytest.mark.parametrize(("low", "high", "cap"), [(0.02, 0.2, 20.0), (0.3, 0.01, 1.05)])
def test_dppo_given_the_rollout_policy_is_the_row(verl, name, low, high, cap, seed):
    """The published anchor, thresholds of its own on both sides, and the truncation of the paper."""
    batch = random_batch(seed, far=NEAR[name])
    fields = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": cap}
    config = actor(verl, batch, loss_scale_factor=31, **fields)
    theirs = verl_loss(verl, name, batch.bypass, config, MODES["fixed"])
    row = override(METHODS[name], {"gate.low": -low, "gate.high": high, "weight.cap": cap})
    agree(ours(row, batch, horizon=31), *theirs)


def test_a_token_that_was_all_but_impossible_has_moved_by_its_new_probability(verl):
    """log-probs -30 and -0.5: the probability moved by 0.61, far beyond 0.15."""
    batch = one_sequence(old=[-30.0], logp=[-0.5], advantage=0.5)
    config = actor(verl, batch, clip_ratio_low=0.15, clip_ratio_high=0.15)
    _, gradient = verl_loss(verl, "dppo_tv", batch, config, "token-mean")
    assert not gradient.any()
    assert not ours(METHODS["dppo_tv"], batch, horizon=1).keep.any()


def test_dppo_truncates_at_three_in_verl_whatever_its_comment_says(verl):
    """Its code asks the configuration for 20 in case there is no field; there is one, and it says 3."""
    batch = random_batch(0)
    batch = replace(batch, logp=(batch.old + 1.5).clamp(max=0.0), advantages=-batch.advantages.abs())
    config = actor(verl, batch, clip_ratio_low=0.15, clip_ratio_high=0.15)
    assert config.get("clip_ratio_c", 20.0) == 3.0
    _, gradient = verl_loss(verl, "dppo_tv", batch, config, "token-mean")
    row = replace(override(METHODS["dppo_tv"], STALE), aggregate="token_mean")
    differ(ours(row, batch).gradient, gradient)
    same(ours(override(row, {"weight.cap": 3.0}), batch).gradient, gradient)


VANILLA = {
    "ppo_clip": ({"clip_ratio_c": NEVER}, None, None),
    "dapo": ({"clip_ratio_c": NEVER, "clip_ratio_high": 0.28}, None, None),
    "dual_clip": ({}, None, None),
    "delta_clip": ({"clip_ratio_c": 4.0}, None, None),
    "grpo": ({"clip_ratio_c": NEVER}, None, None),
    "dr_grpo": ({"clip_ratio_c": NEVER, "loss_scale_factor": 31}, None, None),
    "decoupled_ppo": ({}, ("token", 2.0), None),
    "flashrl": ({"clip_ratio_c": NEVER}, ("token", 2.0), None),
    "fp8_rl": ({"clip_ratio_c": NEVER, "clip_ratio_high": 0.28}, ("token", 2.0), None),
    "icepop": ({"clip_ratio_c": NEVER}, ("token", "0.5_5.0"), None),
    "ring_1t": ({"clip_ratio_c": NEVER}, ("token", "0.5_5.0"), None),
    "areal": ({"clip_ratio_c": NEVER}, ("token", f"{NONE}_5.0"), None),
    "icepop_binary": ({"clip_ratio_c": NEVER}, None, ("token_k1", "0.5_5.0")),
    "geo_mask": ({"clip_ratio_c": NEVER}, None, ("seq_mean_k1", "0.99_1.01")),
    "decoupled_geo": ({"clip_ratio_high": 0.28}, ("token", 2.0), ("seq_mean_k1", "0.99_1.01")),
    "ppo_clip_geo_rs": ({}, None, ("seq_mean_k1", "0.99_1.01")),
}
"""Row: verl's clips, its importance weights (unit and threshold), its rejection (mode and band)."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", VANILLA)
def test_rows_of_verls_vanilla_loss(verl, name, seed):
    """The band of a gate is on the ratio: verl has to be given its inverse (dis.02)."""
    fields, weight, gate = VANILLA[name]
    batch, row = random_batch(seed, sequences=40), METHODS[name]
    config = actor(verl, batch, **fields)
    assert row.objective == clipped_as(config)
    assert row.correction.weights == (() if weight is None else (weight_as("mismatch", *weight),))
    assert row.correction.gates == (() if gate is None else (rejection(*gate, on="mismatch"),))
    weights = None if weight is None else weights_of(verl, batch, *weight)
    mask = batch.mask
    if gate is not None:
        low, high = map(float, gate[1].split("_"))
        mask, _ = verl.rollout_corr_helper.compute_rollout_rejection_mask(
            batch.old - batch.rollout, batch.mask, gate[0], f"{1 / high!r}_{1 / low!r}"
        )
        assert 0 < int(mask.sum()) < batch.tokens
    theirs = verl_loss(verl, "vanilla", replace(batch, mask=mask), config, MODES[row.aggregate], weights)
    mine = ours(row, batch, horizon=31)
    agree(mine, *theirs)
    assert torch.equal(mine.keep, mask.bool())
    if weights is not None:
        same(mine.weight, weights)


def test_sequence_mis_with_the_clipped_surrogate(verl):
    """verl has no mask on products; the row is its vanilla loss under weights that are masked by hand."""
    batch, row = random_batch(1, sequences=40), METHODS["decoupled_seq_mis"]
    log_rho = ((batch.old - batch.rollout) * batch.mask).sum(-1, keepdim=True).expand_as(batch.old)
    rho = log_rho.exp()
    weights = rho.where(rho <= 3.0, 0.0) * batch.mask
    config = actor(verl, batch, clip_ratio_c=NEVER)
    theirs = verl_loss(verl, "vanilla", batch, config, MODES[row.aggregate], weights)
    agree(ours(row, batch), *theirs)
    assert 0 < int((weights > 0).sum()) < batch.tokens


# -- rows of the bypass loss ----------------------------------------------------------------------

BYPASSED = {
    "token_tis": {"rollout_is": "token"},
    "seq_tis": {"rollout_is": "sequence"},
    "token_mis": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "seq_mis": {"rollout_is": "sequence", "rollout_is_threshold": f"{NONE}_3.0"},
    "seq_mis_band": {"rollout_is": "sequence", "rollout_is_threshold": f"{1 / 3!r}_3.0"},
    "full_is": {"rollout_is": "sequence", "rollout_is_threshold": NEVER},
    "normalized_tis": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", BYPASSED)
def test_bypassed_reinforce_rows(verl, name, seed):
    batch, row = random_batch(seed, sequences=30), METHODS[name]
    batch, given = replace(batch, logp=batch.old), BYPASSED[name]
    threshold = given.get("rollout_is_threshold", 2.0)
    normalize = given.get("rollout_is_batch_normalize", False)
    expected = weight_as("full", given["rollout_is"], threshold, normalize)
    assert row.correction.weights == (expected,)
    theirs = bypass(verl, batch, MODES[row.aggregate], loss_type="reinforce", **given)
    mine = ours(row, batch)
    agree(mine, *theirs)
    assert len(mine.weight.unique()) > 5


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("mode", "threshold"), [("seq_max_k2", 0.05), ("seq_mean_k3", 0.001)])
def test_sampled_stand_ins_of_trust_region_masking(verl, mode, threshold, seed):
    """verl has no surrogate w A: its PPO with clips that never act is one."""
    batch = random_batch(seed, sequences=40)
    batch = replace(batch, logp=batch.old)
    row = METHODS[{"seq_max_k2": "trm_max_k2", "seq_mean_k3": "trm_avg_k3"}[mode]]
    assert row.correction.gates == (rejection(mode, threshold, on="full"),)
    config = verl.RolloutCorrectionConfig(
        bypass_mode=True, loss_type="ppo_clip", rollout_is=None, rollout_rs=mode, rollout_rs_threshold=threshold
    )
    fields = actor(
        verl,
        batch,
        policy_loss={"rollout_correction": config},
        clip_ratio_low=1.0,
        clip_ratio_high=NEVER,
        clip_ratio_c=NEVER,
    )
    theirs = verl_loss(verl, "bypass_mode", batch.bypass, fields, MODES[row.aggregate])
    mine = ours(row, batch)
    agree(mine, *theirs)
    assert 0 < int(mine.keep.sum()) < batch.tokens


def test_without_clips_it_is_the_surrogate(verl):
    batch = random_batch(2)
    fields = {"clip_ratio_low": 1.0, "clip_ratio_high": NEVER, "clip_ratio_c": NEVER}
    config = actor(verl, batch, **fields)
    theirs = verl_loss(verl, "vanilla", batch.bypass, config, "seq-mean-token-sum")
    agree(ours(METHODS["token_is"], batch), *theirs)


# -- weights on other losses ----------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["token", "sequence"])
@pytest.mark.parametrize("name", ["gpg", "cispo", "dppo_tv", "dppo_kl"])
def test_every_loss_takes_rollout_weights(verl, name, unit):
    batch = random_batch(4)
    weights = weights_of(verl, batch, unit, 2.0)
    config = actor(verl, batch, clip_ratio_low=0.2, clip_ratio_high=0.2)
    theirs = verl_loss(verl, name, batch, config, "token-mean", weights)
    row = replace(METHODS[name], aggregate="token_mean")
    if name.startswith("dppo"):
        row = override(row, {**STALE, "gate.low": -0.2, "gate.high": 0.2, "weight.cap": 3.0})
    mismatch = Weight(on="mismatch", unit=unit, cap=2.0)
    agree(ours(replace(row, correction=row.correction & mismatch), batch), *theirs)


@pytest.mark.parametrize("name", ["otb", "tir_otb"])
def test_rows_of_a_baseline(verl, name):
    """Their loss is the weighted score function; what makes them is the advantage."""
    batch = random_batch(4)
    weights = weights_of(verl, batch, "token", 2.0)
    theirs = verl_loss(verl, "gpg", batch, actor(verl, batch), "token-mean", weights)
    agree(ours(METHODS[name], batch), *theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_fraction_of_clipped_tokens(verl, seed):
    """dis.34: where a clip changed the loss; verl counts the dual clip apart, and both are disjoint."""
    batch = random_batch(seed, sequences=40)
    batch = replace(batch, logp=(batch.old + 2 * (batch.logp - batch.old)).clamp(max=0.0))
    _, metrics = verl.core_algos.compute_policy_loss_vanilla(
        batch.old, batch.logp, batch.advantages, batch.mask, config=actor(verl)
    )
    packed = batch.pack()
    out = policy_loss(packed, METHODS["dual_clip"], packed.like_caller(batch.advantages))
    both = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
    assert min(metrics["actor/pg_clipfrac"], metrics["actor/pg_clipfrac_lower"]) > 0
    assert summarize(out.stats)["objective/clip_frac_active"] == pytest.approx(both, rel=1e-6)
