"""Methods as policy losses of the real verl: its `ppo_loss` calls them, one micro-batch at a time."""

import importlib.util
import logging
import math
from collections import Counter
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch

from offdrift.adapters.verl import losses as verl_losses
from offdrift.adapters.verl import proof as verl_proof
from offdrift.adapters.verl.losses import driver_share, loss_share, missing, modes, runnable
from offdrift.errors import EvidenceError, FrameworkError, LivenessError, MethodError
from offdrift.loss import policy_loss
from offdrift.methods import METHODS
from tests.adapters.verl_run import BYPASS, GARBAGE, config, pushed, real_verl
from tests.parity.peers import Batch, random_batch, same, verl_loss

AGGREGATES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
if (importlib.util.find_spec("verl") is not None) and version("verl") < "0.9":  # which has no sum over tokens
    AGGREGATES.remove("token-sum")
ROWS = runnable()
WHOLE = [n for n in ROWS if loss_share(METHODS[n]).needs_whole_step]
PIECES = [n for n in ROWS if n not in WHOLE]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Each test is the first call of its process, with nothing in the environment."""
    for name in ("METHOD", "SETTINGS", "ON_IDLE", "RECORD"):
        monkeypatch.delenv(f"OFFDRIFT_{name}", raising=False)
    monkeypatch.setattr(verl_losses, "_REPORTED", set())
    monkeypatch.setattr(verl_proof, "PROVED", set())
    verl_losses.configured.cache_clear()
    yield
    verl_losses.configured.cache_clear()


def batch_for(name: str, seed: int = 0) -> Batch:
    """A batch as the row's mode has it: in bypass the rollout policy stands in the old one's place."""
    batch = random_batch(seed, far=False)
    return batch.bypass if ROWS[name] == "bypass" else batch


def weights_for(name: str, batch: Batch):
    """The driver's weights, where the row leaves it a share; every fifth token was rejected."""
    if ROWS[name] != "decoupled":
        return None
    weights = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(1)).double() + 0.5
    return weights.where(torch.arange(batch.width) % 5 != 3, 0.0) * batch.mask


def run(name: str, how: str, batch: Batch, *, counts: tuple[int, int] | None = None, **options):
    """Loss, gradient and metrics, divided by the whole batch's counts unless given."""
    tokens, sequences = counts or (batch.tokens, batch.sequences)
    fields = {"loss_scale_factor": 23} if how.endswith("norm") else {}
    cfg = config(f"offdrift/{name}", how, bypass=ROWS[name] == "bypass", **fields)
    options.setdefault("weights", weights_for(name, batch))
    return pushed(cfg, batch, tokens=tokens, sequences=sequences, **options)


def test_every_method_is_registered_and_each_has_one_of_four_fates():
    registry = real_verl().core_algos.POLICY_LOSS_REGISTRY
    ours = {n.removeprefix("offdrift/") for n in registry if n.startswith("offdrift/")}
    assert ours == set(METHODS)
    assert len(ours) == len(METHODS) > 100
    assert Counter(map(modes, METHODS.values())) == {"either": 33, "bypass": 38, "decoupled": 34, "none": 33}


def test_what_cannot_run_says_what_it_lacks():
    lacking = {name: missing(row) for name, row in METHODS.items() if missing(row)}
    assert lacking["trm_max"] == ("divergences of whole distributions",)
    assert lacking["espo"] == ("entropy of the batch", "vocab of the batch")
    assert lacking["opsm"] == ("rollout and old log-probs at once",)
    assert lacking["turn_ppo"] == ("turns",)
    assert lacking["echo2"] == ("version_lag of the batch",)
    assert lacking["topr"] == lacking["dispo"] == ("rewards of the batch",)
    assert lacking["r2vpo_clip"] == ("prompt groups",)
    batch = random_batch(0, far=False)
    for name, lacks in lacking.items():
        with pytest.raises(EvidenceError) as error:
            pushed(config(f"offdrift/{name}"), batch, tokens=batch.tokens, sequences=batch.sequences)
        words = ("hands its policy loss log-probs of the drawn tokens alone",) if name == "troll" else lacks
        assert all(x in str(error.value) for x in (f"offdrift/{name}", *words))
    assert lacking["online_dpo"][0] == "rewards of the batch"
    assert lacking["online_dpo"][1].startswith("log-probs of the reference policy")
    assert lacking["ac_mis_po"] == ("the end of a step, where it adapts",)
    assert lacking["troll"] == ("distributions of the batch",)
    assert len(lacking) == 33


def test_a_loss_outside_bypass_mode_does_not_read_the_rollout_policy():
    """Found by moving it: what stands in for the rollout's log-probs must not show in the loss."""
    batch, compared = random_batch(3, far=False), 0
    other = replace(batch, rollout=batch.logp)
    for name, mode in ROWS.items():
        share = loss_share(METHODS[name])
        losses = []
        for b in (batch, other):
            packed = b.pack()
            options = {"horizon": 23} if share.aggregate == "fixed" else {}
            losses.append(policy_loss(packed, share, packed.like_caller(b.advantages), **options).loss)
        if mode == "bypass":
            assert float((losses[0] - losses[1]).abs()) > 1e-6, name
        else:
            assert torch.equal(*losses), name
        compared += 1
    assert compared == 105


SAME = {
    "dual_clip": ("vanilla", {}),
    "disabled": ("vanilla", {}),
    "gspo": ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "gspo_token": ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "sapo": ("sapo", {}),
    "gpg": ("gpg", {}),
    "none": ("gpg", {}),
}
"""Our row -> verl's loss, and the numbers that verl takes from the actor's configuration."""


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("name", SAME)
def test_parity_with_verls_own_loss(name, how, weighted):
    theirs, fields = SAME[name]
    if how != "seq-mean-token-mean" and theirs in ("gspo", "sapo"):
        how = "seq-mean-token-mean"  # verl's own aggregates in one way, whatever it is asked
    batch = random_batch(4, far=False, per_token=False)
    weights = weights_for("icepop", batch) if weighted else None
    if weights is not None and name == "gspo":  # verl's gradient goes through each token alone
        weights = weights[:, :1].expand_as(weights) * batch.mask
    loss, gradient, _ = run(name, how, batch, weights=weights)
    scale = {"loss_scale_factor": 23} if how.endswith("norm") else {}
    cfg = config(theirs, how, **fields, **scale)
    theirs = pushed(cfg, batch, weights=weights, tokens=batch.tokens, sequences=batch.sequences)
    torch.testing.assert_close(loss, theirs[0], rtol=2e-8, atol=1e-9)
    torch.testing.assert_close(gradient, theirs[1], rtol=2e-8, atol=1e-9)
    assert int((gradient != 0).sum()) > 20


@pytest.mark.parametrize("preset", ["bypass_ppo_clip", "bypass_ppo_clip_k3_rs", "bypass_pg_is"])
def test_parity_with_verls_bypass_mode(preset):
    """Its `bypass_mode` loss, which computes weights and rejections inside, with its own block."""
    verl, row = real_verl(), METHODS[preset]
    batch = random_batch(5, far=False, sequences=40).bypass
    block = getattr(verl.RolloutCorrectionConfig, preset)()
    policy_loss = verl.OmegaConf.create({"loss_mode": "bypass_mode"})
    verl.rollout_corr_helper.apply_bypass_mode(
        verl.DataProto.from_dict(tensors={"rollout_log_probs": batch.rollout}), block, policy_loss
    )
    cfg = config("bypass_mode", global_batch_info={"dp_size": 1, "batch_num_tokens": batch.tokens})
    object.__setattr__(cfg, "policy_loss", policy_loss)
    theirs = verl_loss(verl, "bypass_mode", batch, cfg, "token-mean")
    loss, gradient, _ = run(preset, "token-mean", batch)
    same(loss, theirs[0])
    same(gradient, theirs[1])
    assert int((gradient != 0).sum()) > 20
    assert row.needs_old is False


def test_verl_logs_what_it_logs_for_its_own():
    batch = random_batch(6, far=False)
    mine = run("dual_clip", "token-mean", batch)[2]
    own = pushed(config("vanilla"), batch, tokens=batch.tokens, sequences=batch.sequences)[2]
    assert mine["actor/ppo_kl"].aggregate() == pytest.approx(own["actor/ppo_kl"].aggregate(), abs=1e-8)
    assert {"actor/pg_loss", "offdrift/staleness/k3", "offdrift/weight/mean"} <= set(mine)


@pytest.mark.parametrize("name", PIECES)
def test_micro_batches_on_two_ranks_are_the_whole(name):
    """Four pieces of sizes 3, 4, 1, 6 on two ranks, whose gradients verl averages."""
    how = AGGREGATES[PIECES.index(name) % len(AGGREGATES)]
    batch = batch_for(name, seed=8)
    weights = weights_for(name, batch)
    loss, gradient, _ = run(name, how, batch)
    counts, parts, total = (batch.tokens, batch.sequences), [], 0.0
    for piece in (slice(0, 3), slice(3, 7), slice(7, 8), slice(8, 14)):
        held = None if weights is None else weights[piece]
        part = run(name, how, batch.rows(piece), counts=counts, ranks=2, weights=held)
        parts.append(part[1])
        total = total + part[0]
    torch.testing.assert_close(total / 2, loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(torch.cat(parts) / 2, gradient, rtol=1e-6, atol=1e-9)
    assert int((gradient != 0).sum()) > 5


@pytest.mark.parametrize("name", ROWS)
def test_padding_order_and_width_do_not_matter(name):
    """NaN, 1e9 and inf at masked positions; rows permuted; ten more columns of padding."""
    how = AGGREGATES[list(ROWS).index(name) % len(AGGREGATES)]
    order = torch.tensor([3, 0, 13, 5, 1, 2, 4, 6, 12, 11, 10, 9, 8, 7])
    batch = batch_for(name, seed=9)
    weights = weights_for(name, batch)
    loss, gradient, _ = run(name, how, batch)
    garbage = torch.tensor(GARBAGE).double()[torch.arange(batch.width + 10) % len(GARBAGE)]
    mask = torch.nn.functional.pad(batch.mask, (0, 10))[order]

    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 10))[order].where(mask.bool(), garbage)

    fields = ("rollout", "old", "logp", "ref", "advantages")
    again, back, _ = run(
        name,
        how,
        Batch(**{f: moved(getattr(batch, f)) for f in fields}, mask=mask),
        weights=None if weights is None else moved(weights),
    )
    torch.testing.assert_close(again, loss, rtol=1e-12, atol=1e-12)
    assert not bool(back[~mask.bool()].any())
    torch.testing.assert_close(back[:, :-10][order.argsort()], gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(ROWS)[::8])
def test_a_masked_micro_batch_is_zero_and_finite(name):
    batch = batch_for(name)
    empty = replace(batch, mask=torch.zeros_like(batch.mask), logp=torch.full_like(batch.logp, math.nan))
    weights = None if ROWS[name] != "decoupled" else torch.zeros_like(batch.old)
    loss, gradient, metrics = run(name, "token-mean", empty, counts=(50, 8), weights=weights)
    full = run(name, "token-mean", batch)[2]
    assert float(loss) == 0
    assert int(gradient.count_nonzero()) == 0
    assert metrics.keys() == full.keys()  # verl joins ranks by position


def test_half_of_the_sequences_rejected_halves_the_step_and_no_more():
    """The denominator counts what was sampled: the kept push as if nothing had been rejected."""
    batch = random_batch(2, far=False)
    ones = torch.ones_like(batch.old)
    for how in AGGREGATES:
        loss, gradient, _ = run("icepop", how, random_batch(1, far=True), weights=0 * ones)
        assert float(loss) == int(gradient.count_nonzero()) == 0, "everything rejected is a step of zero"
    half = ones.clone()
    half[::2] = 0
    everything = run("decoupled_k3_rs", "seq-mean-token-sum", batch, weights=ones)[1]
    kept = run("decoupled_k3_rs", "seq-mean-token-sum", batch, weights=half)[1]
    same(kept[1::2], everything[1::2])
    assert int(kept[::2].count_nonzero()) == 0
    assert int(kept.count_nonzero()) > 20


@pytest.mark.parametrize("name", WHOLE)
def test_what_looks_at_the_whole_step_gets_it_or_refuses(name):
    batch = batch_for(name, seed=4)
    assert run(name, "token-mean", batch)[1].count_nonzero() > 5
    half = batch.rows(slice(0, 7))
    with pytest.raises(EvidenceError, match="whole mini-batch"):
        run(name, "token-mean", half, counts=(batch.tokens, batch.sequences))
    with pytest.raises(EvidenceError, match="one of 2 ranks"):
        run(name, "token-mean", batch, ranks=2)


def test_a_method_on_the_full_ratio_needs_to_be_told_of_bypass_mode():
    batch = random_batch(0, far=False).bypass
    counts = {"tokens": batch.tokens, "sequences": batch.sequences}
    with pytest.raises(EvidenceError, match=r"rollout_correction=\$\{algorithm.rollout_correction\}"):
        pushed(config("offdrift/trm_max_k2"), batch, **counts)
    assert pushed(config("offdrift/trm_max_k2", bypass=True), batch, **counts)[1].count_nonzero() > 0
    assert BYPASS["rollout_correction"]["bypass_mode"]


@pytest.mark.parametrize("name", ["trm_max_k2", "token_is", "token_tis", "bypass_ppo_clip"])
def test_the_mismatch_is_not_counted_twice(name):
    batch = batch_for(name)
    with pytest.raises(MethodError, match="count twice"):
        run(name, "token-mean", batch, weights=torch.ones_like(batch.old))
    with pytest.raises(EvidenceError, match=r"install\('icepop'\)"):  # and a share of the driver must arrive
        run("icepop", "token-mean", random_batch(0, far=False), weights=None)


def test_driver_and_loss_together_are_the_method():
    """The driver's share as weights, then the loss: the row on all three policies at once."""
    batch, compared = random_batch(11, far=False), 0
    for name, mode in ROWS.items():
        if mode != "decoupled":
            continue
        row = replace(METHODS[name], aggregate="token_mean")
        leaf = batch.logp.clone().requires_grad_()
        packed = batch.pack(leaf)
        whole = policy_loss(packed, row, packed.like_caller(batch.advantages))
        (expected,) = torch.autograd.grad(whole.loss, leaf)
        driven = driver_share(row)(batch.pack())
        weights = packed.unpack(driven.weight.where(driven.keep, 0.0))
        loss, gradient, _ = run(name, "token-mean", batch, weights=weights)
        same(loss, whole.loss.detach())
        same(gradient, expected)
        compared += 1
    assert compared == 34


def test_counts_that_are_missing_are_named():
    batch = random_batch(0, far=False)
    with pytest.raises(MethodError, match="batch_num_tokens"):
        pushed(config("offdrift/ppo_clip"), batch, sequences=4, ranks=2)
    with pytest.raises(MethodError, match="loss_scale_factor"):
        pushed(config("offdrift/ppo_clip", "seq-mean-token-sum-norm"), batch, sequences=4)
    with pytest.raises(MethodError, match="loss_agg_mode='sum'"):
        verl_losses.policy_loss_named("ppo_clip")(batch.old, batch.logp, batch.advantages, batch.mask, "sum")


def test_without_counts_a_rejected_sequence_stays_in_the_denominator():
    """verl alone divides by the sequences that are left; here one of 14 is masked whole."""
    batch = random_batch(0, far=False)
    mine = pushed(config("offdrift/disabled", "seq-mean-token-sum"), batch)
    own = pushed(config("vanilla", "seq-mean-token-sum"), batch)
    same(mine[0] * 14, own[0] * 13)


def test_settings_of_the_environment_change_the_row(monkeypatch):
    batch = random_batch(0, far=False)
    before = run("ppo_clip", "token-mean", batch)[0]
    verl_losses.configured.cache_clear()
    monkeypatch.setenv("OFFDRIFT_SETTINGS", "objective.eps_low=0.5,objective.eps_high=0.5")
    after = run("ppo_clip", "token-mean", batch)[0]
    cfg = config("vanilla", clip_ratio_low=0.5, clip_ratio_high=0.5, clip_ratio_c=1e30)
    own = pushed(cfg, batch, tokens=batch.tokens, sequences=batch.sequences)[0]
    same(after, own)
    assert float(before) != float(after)
    verl_losses.configured.cache_clear()
    monkeypatch.setenv("OFFDRIFT_METHOD", "icepop")  # then the settings are that row's
    same(run("ppo_clip", "token-mean", batch)[0], before)


def test_liveness_is_said_once(caplog):
    batch = batch_for("trm_max_k2")
    with caplog.at_level(logging.INFO, "offdrift.verl"):
        run("trm_max_k2", "token-mean", batch)
        run("trm_max_k2", "token-mean", batch)
    said = [r.getMessage() for r in caplog.records]
    gates = [x for x in said if x.startswith("gate [keep if seq_max k2(full)")]
    assert len(gates) == 1
    assert "tokens changed" in gates[0]


def test_copies_of_the_log_probs_are_an_error(monkeypatch):
    """Declared bypass, recomputed old log-probs: the first update would compare a policy with itself."""
    batch = replace(batch_for("token_is"), logp=batch_for("token_is").old)
    with pytest.raises(LivenessError, match="equal the current ones"):
        run("token_is", "token-mean", batch)
    verl_losses._REPORTED.clear()
    monkeypatch.setenv("OFFDRIFT_ON_IDLE", "warn")
    assert run("token_is", "token-mean", batch)[1].count_nonzero() > 0


def test_neither_the_first_update_nor_certain_tokens_are_blamed():
    """One word that every policy is sure of: log-probs are 0, honest, and equal."""
    batch = random_batch(0, far=False)
    assert run("gspo", "seq-mean-token-mean", replace(batch, logp=batch.old))[1].count_nonzero() > 0
    batch = batch_for("token_is")
    nothing = torch.zeros_like(batch.old)
    sure = replace(batch, rollout=nothing, old=nothing, logp=nothing)
    assert run("token_is", "token-mean", sure)[1].count_nonzero() > 0
    with pytest.raises(LivenessError, match="equal the current ones"):
        run("token_is", "token-mean", replace(batch, logp=batch.old))


def test_what_to_do_when_idle_is_spelled_right(monkeypatch):
    monkeypatch.setenv("OFFDRIFT_ON_IDLE", "warning")
    with pytest.raises(MethodError, match=r"OFFDRIFT_ON_IDLE='warning'.*'error', 'warn'"):
        run("token_is", "token-mean", batch_for("token_is"))


@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("name", ["ppo_clip", "icepop", "token_tis"])
def test_verls_own_loss_is_ours_with_every_weight_1(name, how, caplog):
    batch = batch_for(name, 3)
    with caplog.at_level(logging.INFO, "offdrift.verl"):
        run(name, how, batch, counts=(batch.tokens + 7, batch.sequences + 2), ranks=2)
    assert f"compute_policy_loss_vanilla with loss_agg_mode={how!r}: loss" in caplog.text
    assert how in verl_proof.PROVED


def far(agg):
    """A mean over the sequences' own tokens, whatever was asked for."""
    return lambda **given: agg(**{**given, "loss_agg_mode": "seq-mean-token-mean"})


def doubled(agg):
    """Ranks counted twice."""
    return lambda **given: agg(**{**given, "dp_size": 2 * given.get("dp_size", 1)})


def without_mask(agg):
    """Padding that counts."""
    return lambda **given: agg(**{**given, "loss_mask": torch.ones_like(given["loss_mask"])})


@pytest.mark.parametrize("change", [far, doubled, without_mask], ids=lambda f: f.__name__)
def test_a_verl_that_aggregates_otherwise_is_refused_at_the_first_batch(change, monkeypatch):
    core = real_verl().core_algos
    monkeypatch.setattr(core, "agg_loss", change(core.agg_loss))
    refusal = r"core_algos.compute_policy_loss_vanilla with loss_agg_mode='token-mean' is"
    for _ in range(2):  # a loop that catches the first refusal meets another
        with pytest.raises(FrameworkError, match=refusal):
            run("ppo_clip", "token-mean", batch_for("ppo_clip"))
