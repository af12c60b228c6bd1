"""verl's 19 rollout correction presets, run by verl's own step, against the rows of those names.

verl's step: correct the batch (decoupled) or hand the configuration to the actor (bypass), then
`ppo_loss`, which divides by the counts it is given. Given the counts of everything sampled it is
ours; given what its trainer gives it, it is ours divided by what survived, which is asserted too.
"""

import inspect
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from offdrift.correction import Correction, Weight, rejection
from offdrift.methods import Method
from offdrift.methods.table import PRESET_ROWS
from offdrift.objectives import Clipped, Reinforce
from offdrift.penalty import KLPenalty
from tests.parity.peers import MODES, Batch, actor, agree, differ, ours, random_batch, same, theirs, verl_loss

SEEDS = range(3)
REJECTING = [name for name, row in PRESET_ROWS.items() if row.correction.gates]
WEIGHTED = [name for name, row in PRESET_ROWS.items() if row.correction.weights]
GEOMETRIC = [name for name in PRESET_ROWS if "geo" in name]


def drifting(seed: int, name: str) -> Batch:
    """A batch of which the preset's thresholds leave some sequences and not all.

    Bypass presets look at the full ratio: there the weights have not changed since the rollout.
    """
    batch = random_batch(seed, sequences=40)
    return replace(batch, logp=batch.old) if name.startswith("bypass") else batch


def preset(verl, name: str):
    return getattr(verl.RolloutCorrectionConfig, name)()


class Step:
    """One step of verl's actor under a rollout correction."""

    def __init__(self, verl: SimpleNamespace, config, batch: Batch, **fields) -> None:
        self.verl, self.batch, self.fields = verl, batch, fields
        data = verl.DataProto.from_dict(
            tensors={
                "old_log_probs": batch.old,
                "rollout_log_probs": batch.rollout,
                "response_mask": batch.mask.clone(),
                "advantages": batch.advantages,
                "ref_log_prob": batch.ref,
            }
        )
        policy_loss = verl.OmegaConf.create({"loss_mode": "vanilla"})
        if config.bypass_mode:
            verl.rollout_corr_helper.apply_bypass_mode(data, config, policy_loss)
        else:
            data, _ = verl.rollout_corr_helper.compute_rollout_correction_and_add_to_batch(data, config)
        self.data, self.policy_loss = data.batch, policy_loss

    def loss(self, how: str, *, tokens: int | None, sequences: int | None) -> tuple[Tensor, Tensor]:
        """Loss and gradient, divided by the given counts (None: by what its mask still has)."""
        config = actor(self.verl, loss_agg_mode=how, policy_loss=self.policy_loss, **self.fields)
        b, t = self.batch.mask.shape
        data = self.verl.TensorDict(
            {
                **self.data,
                "prompts": torch.zeros(b, 1, dtype=torch.int64),
                "responses": torch.zeros(b, t, dtype=torch.int64),
                "attention_mask": torch.ones(b, 1 + t, dtype=torch.int64),
            },
            batch_size=b,
        )
        self.verl.tensordict_utils.assign_non_tensor(
            data, dp_size=1, batch_num_tokens=tokens, global_batch_size=sequences
        )

        def loss(leaf: Tensor) -> Tensor:
            # Unpadded model output: each position predicts the next token.
            flat = torch.cat([leaf, leaf.new_zeros(b, 1)], dim=1).flatten()
            return self.verl.ppo_loss(config, {"log_probs": flat}, data)[0]

        return theirs(loss, self.batch)

    def over_everything(self, how: str) -> tuple[Tensor, Tensor]:
        return self.loss(how, tokens=self.batch.tokens, sequences=self.batch.sequences)


def composed(config) -> tuple[type, Correction]:
    """A preset's configuration as our composition."""
    on = "full" if config.bypass_mode else "mismatch"
    correction = Correction()
    if config.rollout_rs is not None:
        correction &= rejection(config.rollout_rs, config.rollout_rs_threshold, on=on)
    if config.rollout_is is not None:
        ends = [float(x) for x in str(config.rollout_is_threshold).split("_")]
        band = {"floor": ends[0], "outside": "mask"} if len(ends) == 2 else {}
        correction &= Weight(on=on, unit=config.rollout_is, cap=ends[-1], **band)
    return Clipped if config.loss_type == "ppo_clip" else Reinforce, correction


def test_there_is_a_row_for_every_preset(verl):
    methods = inspect.getmembers(verl.RolloutCorrectionConfig, inspect.ismethod)
    presets = {name for name, _ in methods if not name.startswith("_")}
    assert presets == set(PRESET_ROWS)
    assert len(PRESET_ROWS) == 19


@pytest.mark.parametrize("name", PRESET_ROWS)
def test_modes_and_thresholds(verl, name):
    row, config = PRESET_ROWS[name], preset(verl, name)
    objective, correction = composed(config)
    assert row.correction == correction
    assert type(row.objective) is objective
    assert not config.rollout_is_batch_normalize
    if objective is Clipped:
        fields = actor(verl)
        assert row.objective == Clipped(
            on="full" if config.bypass_mode else "staleness",
            eps_low=fields.clip_ratio_low,
            eps_high=fields.clip_ratio_high,
            dual_clip=fields.clip_ratio_c,
        )


def test_what_bypasses(verl):
    bypassing = {name for name in PRESET_ROWS if preset(verl, name).bypass_mode}
    assert bypassing == {name for name in PRESET_ROWS if name.startswith("bypass")}
    assert {"mismatch", "full"} == {w.on for n in WEIGHTED for w in PRESET_ROWS[n].correction.weights}
    assert {name for name in PRESET_ROWS if not PRESET_ROWS[name].needs_old} == bypassing


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PRESET_ROWS)
def test_loss_gradient_mask_and_weights(verl, name, seed):
    row, batch = PRESET_ROWS[name], drifting(seed, name)
    step = Step(verl, preset(verl, name), batch)
    mine = ours(row, batch)
    agree(mine, *step.over_everything(MODES[row.aggregate]))
    if row.needs_old:
        assert torch.equal(mine.keep, step.data["response_mask"].bool())
        if name in WEIGHTED:
            same(mine.weight, step.data["rollout_is_weights"])
    else:
        assert torch.equal(step.data["old_log_probs"], batch.rollout)
    if name in REJECTING:
        assert 0 < int(mine.keep.sum()) < batch.tokens
    if name in WEIGHTED:
        assert len(mine.weight.unique()) > 5


@pytest.mark.parametrize("name", PRESET_ROWS)
def test_every_aggregate(verl, name):
    batch = drifting(7, name)
    for how, verls in MODES.items():
        step = Step(verl, preset(verl, name), batch, loss_scale_factor=23)
        row = replace(PRESET_ROWS[name], aggregate=how)
        # Presets reject whole sequences, so that a sequence's own mean is over the same tokens.
        agree(ours(row, batch, horizon=23), *step.over_everything(verls))


# -- what differs, and why ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize("name", REJECTING)
def test_verl_alone_divides_by_what_survived(verl, name, how):
    """dis.03: without global counts, surviving tokens, or sequences with one; we, by all of them."""
    batch = drifting(3, name)
    row = replace(PRESET_ROWS[name], aggregate=how)
    loss, gradient = Step(verl, preset(verl, name), batch).loss(MODES[how], tokens=None, sequences=None)
    mine = ours(row, batch)
    differ(mine.gradient, gradient, by=1e-4)
    survivors = mine.keep.sum() if how == "token_mean" else mine.keep.any(-1).sum()
    total = batch.tokens if how == "token_mean" else batch.sequences
    assert 0 < int(survivors) < total
    agree(ours(row, batch, normalizer=float(survivors)), loss, gradient)
    same(loss, mine.loss * total / survivors)


CUTTING = ["seq_max_k2", "token_k2", "token_k2,seq_mean_k3"]
"""Modes that reject sequences whole, that cut them, and both."""


def cut(verl, mode: str, batch: Batch, **fields) -> tuple[Method, Step]:
    """Verl's decoupled step under rejection modes, and the composition that they are."""
    threshold = ",".join(["0.005"] * len(mode.split(",")))
    config = verl.RolloutCorrectionConfig(rollout_is=None, rollout_rs=mode, rollout_rs_threshold=threshold)
    correction = Correction()
    for one in mode.split(","):
        correction &= rejection(one, 0.005, on="mismatch")
    method = Method(objective=Clipped(dual_clip=3.0), correction=correction)
    return method, Step(verl, config, batch, **fields)


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("mode", CUTTING)
@pytest.mark.parametrize("name", ["accepted", "verl_trainer"])
def test_denominators_by_name(verl, name, mode, how):
    """dis.03, as a choice: what verl divides by alone, and in its trainer when it is decoupled.

    The trainer counts the tokens of the edited mask, and the sequences of the configured batch.
    """
    batch = random_batch(5, sequences=30)
    method, step = cut(verl, mode, batch, loss_scale_factor=23)
    mine = ours(replace(method, aggregate=how, normalizer=name), batch, horizon=23)
    kept = step.data["response_mask"]
    assert torch.equal(mine.keep, kept.bool())
    assert 0 < int(kept.sum()) < batch.tokens
    counts = {"tokens": None, "sequences": None}
    if name == "verl_trainer":
        counts = {"tokens": int(kept.sum()), "sequences": batch.sequences}
    theirs = step.loss(MODES[how], **counts)
    agree(mine, *theirs)
    sampled = ours(replace(method, aggregate=how), batch, horizon=23)
    if name == "accepted" or how == "token_mean":
        assert not 0.95 < float(sampled.loss / theirs[0]) < 1.05


def test_verls_trainer_counts_survivors_in_one_mode_and_not_in_the_other(verl):
    """dis.03: decoupled, its counts follow the edited mask; in bypass the mask it counts is whole.

    Its engine counts `loss_mask`, a copy of the batch's response mask, for token-mean, and takes the
    configured batch size for sequences.
    """
    counted = {}
    for name in ("decoupled_k3_rs", "bypass_ppo_clip_k3_rs"):
        batch = drifting(3, name)
        counted[name] = int(Step(verl, preset(verl, name), batch).data["response_mask"].sum())
        assert 0 < int(ours(PRESET_ROWS[name], batch).keep.sum()) < batch.tokens
    assert counted["decoupled_k3_rs"] < counted["bypass_ppo_clip_k3_rs"] == batch.tokens


def test_the_mean_over_a_sequence_that_lost_tokens_differs(verl):
    """dis.03 inside a sequence: verl divides by the tokens that are left, we by all it had."""
    batch = random_batch(5)
    method, step = cut(verl, "token_k2", batch)
    gradient = step.over_everything("seq-mean-token-mean")[1]
    mine = ours(replace(method, aggregate="seq_mean_token_mean"), batch)
    differ(mine.gradient, gradient)
    left, had = mine.keep.sum(-1, keepdim=True), batch.mask.sum(-1, keepdim=True)
    assert int(((left > 0) & (left < had)).sum()) > 2
    same(gradient, mine.gradient * had.double() / left.clamp(min=1))


def hand_made(total: float, tokens: int = 4) -> Batch:
    """One sequence that drifted evenly by `total` nats from the rollout, and one that did not."""
    logp = torch.full((2, tokens), -1.0, dtype=torch.float64)
    rollout = logp.clone()
    rollout[0] -= total / tokens
    ones = torch.ones_like(logp)
    return Batch(rollout=rollout, old=logp, logp=logp, ref=logp, advantages=ones, mask=ones.long())


@pytest.mark.parametrize("name", GEOMETRIC)
@pytest.mark.parametrize(("mean_ratio", "we_keep"), [(1.0010005, False), (0.9990005, True)])
def test_between_a_band_and_its_inverse(verl, name, mean_ratio, we_keep):
    """dis.02: verl's [0.999, 1.001] is [1/1.001, 1/0.999] = [0.9990010, 1.0010010] on the ratio."""
    batch = hand_made(4 * math.log(mean_ratio))
    row = PRESET_ROWS[name]
    config = preset(verl, name)
    assert config.rollout_rs_threshold == "0.999_1.001"
    _, gradient = Step(verl, config, batch).over_everything(MODES[row.aggregate])
    mine = ours(row, batch)
    assert mine.keep.tolist() == [[we_keep] * 4, [True] * 4]
    assert ((gradient != 0).all(-1)).tolist() == [not we_keep, True]
    on = row.correction.gates[0].on
    inverted = rejection("seq_mean_k1", "0.999_1.001", on=on, k1_band="verl")
    swapped = replace(row, correction=replace(row.correction, gates=(inverted,)))
    same(ours(swapped, batch).gradient, gradient)


def test_bypassed_reinforce_takes_the_actors_aggregate(verl):
    """Its function alone would sum tokens; in a step it is handed the actor's, token-mean at first.

    The rows of `bypass_pg_*` aggregate as the function does.
    """
    alone = inspect.signature(verl.core_algos.compute_policy_loss_reinforce).parameters
    assert alone["loss_agg_mode"].default == "seq-mean-token-sum"
    assert actor(verl).loss_agg_mode == "token-mean"
    assert {PRESET_ROWS[n].aggregate for n in PRESET_ROWS if "bypass_pg" in n} == {"seq_mean_token_sum"}


@pytest.mark.parametrize(
    ("name", "scope", "other"), [("decoupled_k3_rs", "all", "policy"), ("bypass_ppo_clip_k3_rs", "policy", "all")]
)
def test_what_a_gate_does_to_the_kl_penalty(verl, name, scope, other):
    """dis.61: verl's gate edits the mask of every term when decoupled, of the policy's in bypass."""
    batch = drifting(4, name)
    step = Step(verl, preset(verl, name), batch, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3")
    penalty = KLPenalty(estimator="k3", coef=0.3, value_limit=10.0)
    row = replace(PRESET_ROWS[name], penalty=penalty, gate_scope=scope)
    loss, gradient = step.over_everything("token-mean")
    agree(ours(row, batch), loss, gradient)
    differ(ours(replace(row, gate_scope=other), batch).gradient, gradient)
    # Left to itself, each of verl's terms divides by the mask that it has.
    alone = step.loss("token-mean", tokens=None, sequences=None)
    agree(ours(replace(row, normalizer="accepted"), batch), *alone)


def test_weights_in_bypassed_ppo_are_for_metrics_alone(verl):
    """The ratio is already in the objective: verl drops them, and we refuse the composition."""
    batch = drifting(6, "bypass_ppo_clip")
    config = verl.RolloutCorrectionConfig(rollout_is="sequence", bypass_mode=True, loss_type="ppo_clip")
    loss, gradient = Step(verl, config, batch).over_everything("token-mean")
    agree(ours(PRESET_ROWS["bypass_ppo_clip"], batch), loss, gradient)
    with pytest.raises(ValueError, match="count it twice"):
        replace(PRESET_ROWS["bypass_ppo_clip"], correction=PRESET_ROWS["bypass_pg_is"].correction)


def test_a_microbatch_is_a_share_of_the_step(verl):
    """Two ranks, each dividing by the whole step's counts: verl scales by the ranks it averages."""
    batch, name = random_batch(8), "decoupled_token_is"
    parts = [batch.rows(slice(0, 7)), batch.rows(slice(7, None))]
    total = ours(PRESET_ROWS[name], batch).gradient
    mine, verls = [], []
    for part in parts:
        mine.append(ours(PRESET_ROWS[name], part, normalizer=float(batch.tokens)).gradient)
        weights = Step(verl, preset(verl, name), part).data["rollout_is_weights"]
        config = actor(verl, part)
        config.global_batch_info.update(dp_size=2, batch_num_tokens=batch.tokens)
        verls.append(verl_loss(verl, "vanilla", part, config, "token-mean", weights)[1])
    same(torch.cat(mine), total)
    same(torch.cat(verls) / 2, total)
