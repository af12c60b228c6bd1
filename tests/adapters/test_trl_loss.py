"""The correction in TRL's own loss, of every type, without a model.

Where TRL can do the same (its importance ratios for vLLM), both must agree; beyond that, the laws.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from offdrift.adapters.trl.batch import piece_of
from offdrift.correction import Correction, Gate, Weight
from offdrift.errors import EvidenceError, LivenessError, MethodError
from offdrift.methods import METHODS, Method, method, override
from offdrift.objectives import Clipped
from offdrift.penalty import KLPenalty
from tests.adapters.trl_bare import LOSSES, generated, inputs_of, ours, pushed, theirs
from tests.parity.peers import Batch, agree, differ, random_batch, same
from tests.parity.peers import ours as packed_loss
from tests.parity.trl_trainer import HORIZON, sequence_batch


def weight(how: str, **limits: float | None) -> Method:
    """TRL's mode of `vllm_importance_sampling_mode` as a method."""
    unit, _, outside = how.partition("_")
    part = Weight(on="mismatch", unit=unit, outside=outside, **limits)  # type: ignore[arg-type]
    return Method(objective=Clipped(), correction=Correction() & part)


def modes(loss_type: str) -> list[str]:
    token = ["token_truncate", "token_mask"]
    return token if loss_type == "vespo" else [*token, "sequence_truncate", "sequence_mask"]


def by_vllm(how: str, **limits: float) -> dict[str, Any]:
    """TRL's own correction."""
    numbers = {f"vllm_importance_sampling_{name}": x for name, x in limits.items()}
    return {"use_vllm": True, "vllm_importance_sampling_mode": how, **numbers}


PARITY = [(loss_type, how) for loss_type in LOSSES for how in modes(loss_type)]


@pytest.mark.parametrize(("loss_type", "how"), PARITY)
def test_weights_are_those_of_trl_where_it_has_them(loss_type, how):
    batch, limits = sequence_batch(2, sequences=20), {"clip_max": 1.2, "clip_min": 0.8}
    peer = theirs(batch, loss_type=loss_type, beta=0.3, **by_vllm(how, **limits))
    inputs = peer.generated()
    loss, gradient = peer.loss(inputs)
    mine = ours(batch, weight(how, cap=1.2, floor=0.8), loss_type=loss_type, beta=0.3)
    found, slope = pushed(mine, generated(mine))
    same(found, loss)
    same(slope, gradient)
    ratio = inputs["importance_sampling_ratio"]
    assert 3 <= int((ratio != 1).expand_as(batch.mask)[batch.mask > 0].sum()) <= batch.tokens
    assert int((gradient != 0).sum()) >= 20
    # TRL's own switch is off, and both ratios are not in it; its metrics of them stay.
    (own, metrics) = (t.trainer._metrics["train"] for t in (peer, mine))
    logged = {name: values for name, values in own.items() if name.startswith("sampling/sampling_logp_difference")}
    assert len(logged) == 2
    assert all(metrics[name] == values for name, values in logged.items())
    assert mine.trainer.vllm_importance_sampling_correction is False


@pytest.mark.parametrize(("loss_type", "how"), [(x, "token_truncate") for x in LOSSES] + [("grpo", "sequence_mask")])
def test_a_method_that_only_records_leaves_trls_loss_and_its_correction_alone(loss_type, how):
    batch, limits = sequence_batch(2, sequences=20), by_vllm(how, clip_max=1.2, clip_min=0.8)
    peer = theirs(batch, loss_type=loss_type, **limits)
    loss, gradient = peer.loss(peer.generated())
    mine = ours(batch, METHODS["disabled"], loss_type=loss_type, **limits)
    found, slope = pushed(mine, generated(mine))
    assert torch.equal(found, loss)
    assert torch.equal(slope, gradient)
    assert mine.trainer.vllm_importance_sampling_correction is True
    assert mine.trainer.offdrift.end_step(1)["offdrift/batch/tokens"] == batch.tokens


@pytest.mark.parametrize("loss_type", ["grpo", "luspo", "cispo", "sapo"])
def test_sequence_level_ratios(loss_type):
    batch = sequence_batch(4, sequences=20)
    fields = {"loss_type": loss_type, "importance_sampling_level": "sequence", "epsilon_high": 0.3}
    if loss_type == "luspo":
        fields |= {"beta": 0.1}
    peer = theirs(batch, **fields, **by_vllm("token_truncate", clip_max=1.2))
    loss, gradient = peer.loss(peer.generated())
    mine = ours(batch, weight("token_truncate", cap=1.2), **fields)
    found, slope = pushed(mine, generated(mine))
    same(found, loss)
    same(slope, gradient)


GATE = Gate(statistic="ratio", on="full", unit="seq_mean", low=0.95, high=1.05)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("loss_type", "row"),
    [("grpo", "grpo"), ("bnpo", "ppo_clip"), ("dr_grpo", "dr_grpo"), ("sapo", "sapo"), ("cispo", "cispo_upper")],
)
def test_gates_on_any_ratio_and_weights_in_trls_loss_are_those_of_ours(loss_type, row, per_token):
    """Also with an advantage per token, and under a gate that looks at the current policy."""
    batch = random_batch(5, far=False, sequences=24) if per_token else sequence_batch(5, sequences=24)
    part = Correction() & GATE & Weight(on="mismatch", cap=1.1)
    fields = {"cispo": {"epsilon_high": 5.0}}.get(loss_type, {})
    changes = {"sapo": {"objective.tau_negative": 1.25}}.get(loss_type, {})
    mine = ours(batch, Method(objective=Clipped(), correction=part), loss_type=loss_type, **fields)
    inputs = inputs_of(mine)
    assert inputs["advantages"].ndim == 1 + per_token
    whole = override(METHODS[row], changes)
    whole = replace(whole, correction=whole.correction & part)
    expected = packed_loss(whole, batch, horizon=HORIZON)
    agree(expected, *pushed(mine, inputs))
    assert 0 < int(expected.keep.sum()) < batch.tokens
    assert inputs["advantages"].ndim == 1 + per_token  # ours are in a copy


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("name", ["token_tis", "gspo", "trm_max_k2", "dppo_tv", "normalized_tis"])
def test_our_loss_replaces_trls_whatever_its_type(name, loss_type):
    batch = random_batch(3, far=True, sequences=30)
    row = override(method(name), {"gate.high": 0.5} if name == "trm_max_k2" else {})
    mine = ours(batch, row, "loss", loss_type=loss_type)
    found, slope = pushed(mine, inputs_of(mine))
    expected = packed_loss(row, batch, horizon=HORIZON)
    agree(expected, found, slope)


def test_trls_kl_is_added_to_our_loss_and_metrics_of_its_own_loss_are_not_logged():
    batch = sequence_batch(1)
    mine = ours(batch, METHODS["grpo"], "loss", loss_type="grpo", beta=0.3)
    row = replace(METHODS["grpo"], penalty=KLPenalty(estimator="k3", coef=0.3))
    agree(packed_loss(row, batch), *pushed(mine, inputs_of(mine)))
    for mode, logged in (("correct", True), ("loss", False)):
        mine = ours(batch, METHODS["decoupled_token_is"], mode, loss_type="dapo")
        pushed(mine, inputs_of(mine))
        metrics = mine.trainer._metrics["train"]
        assert ("clip_ratio/low_mean" in metrics) is logged
        assert "entropy" in metrics


BOTH = [("correct", x) for x in LOSSES] + [("loss", "dapo")]


@pytest.mark.parametrize(("mode", "loss_type"), BOTH)
def test_what_is_in_the_padding_does_not_matter(mode, loss_type):
    batch = random_batch(7, far=False)
    row = override(METHODS["decoupled_geo_rs_token_tis"], {"gate.high": 1.05, "gate.low": 0.95})
    mine = ours(batch, row, mode, loss_type=loss_type)
    loss, gradient = pushed(mine, inputs_of(mine))
    assert float(gradient[batch.mask == 0].abs().max()) == 0
    for filling in (math.nan, 1e9, -1e9):
        hurt = {k: getattr(batch, k).where(batch.mask > 0, filling) for k in ("rollout", "old", "logp", "advantages")}
        changes = {
            "advantages": hurt["advantages"],
            "old_per_token_logps": hurt["old"],
            "sampling_per_token_logps": hurt["rollout"],
        }
        again = ours(batch, row, mode, loss_type=loss_type)
        found, slope = pushed(again, inputs_of(again, **changes), logps=hurt["logp"])
        same(found, loss)
        same(slope, gradient)


@pytest.mark.parametrize(("mode", "loss_type"), BOTH)
def test_all_rejected_is_finite_and_pushes_nothing(mode, loss_type):
    """At log-ratios of +-800 nats, where TRL's own ratios overflow in float64."""
    batch = random_batch(1, far=True)
    batch = replace(
        batch,
        logp=batch.logp.index_fill(1, torch.tensor([0]), -800.0),
        old=batch.old.index_fill(1, torch.tensor([1]), -800.0),
    )
    never = Gate(statistic="k2", on="full", unit="seq_max", high=1e-30)
    row = Method(objective=Clipped(), correction=Correction() & never, aggregate="token_mean")
    mine = ours(batch, row, mode, loss_type=loss_type)
    loss, gradient = pushed(mine, inputs_of(mine))
    assert float(loss) == 0
    assert float(gradient.abs().max()) == 0
    assert mine.trainer.offdrift.end_step(1)["offdrift/gate/acceptance_seq"] == 0


@pytest.mark.parametrize("loss_type", [x for x in LOSSES if x != "bnpo"])
def test_accumulation_in_trls_loss(loss_type):
    """TRL's bnpo divides each micro-batch by its own tokens; all others give what one piece gives."""
    batch = sequence_batch(2)
    row = METHODS["decoupled_geo_rs_token_tis"]
    whole = ours(batch, row, loss_type=loss_type)
    expected = pushed(whole, inputs_of(whole))
    same_as(expected, pieces(batch, row, "correct", loss_type=loss_type))


@pytest.mark.parametrize("name", ["token_tis", "gspo", "dr_grpo", "bypass_pg_geo_rs", "normalized_tis", "m2po"])
def test_accumulation_in_our_loss(name):
    """Denominators are of the whole step, and so is what a method looks at before it acts."""
    changes = {"gate.low": 0.8, "gate.high": 1.3} if name == "bypass_pg_geo_rs" else {}
    row = override(method(name), changes)
    batch = random_batch(2, far=False, sequences=30)
    whole = ours(batch, row, "loss")
    expected = pushed(whole, inputs_of(whole))
    assert row.needs_whole_step == (name in ("normalized_tis", "m2po"))
    same_as(expected, pieces(batch, row, "loss"))
    if row.aggregate == "token_mean":  # each half by its own tokens
        naive = [pushed(t, inputs_of(t)) for t in (ours(half, row, "loss") for half in halves(batch))]
        differ(torch.cat([g for _, g in naive]) / 2, expected[1], by=1e-4)


def test_accumulation_of_gates_and_weights_that_look_at_the_whole_step():
    row = override(METHODS["normalized_tis"], {"weight.on": "mismatch"})
    batch = sequence_batch(3)
    whole = ours(batch, row, loss_type="dapo")
    same_as(pushed(whole, inputs_of(whole)), pieces(batch, row, "correct", loss_type="dapo"))


def halves(batch: Batch) -> list[Batch]:
    """Unequal in tokens; two piece of equal numbers of sequences, as TRL's are."""
    n = batch.sequences // 2
    return [batch.rows(slice(0, n)), batch.rows(slice(n, None))]


def pieces(batch: Batch, row: Method, mode: str, **fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the batch in two micro-batches."""
    mine = ours(batch, row, mode, **fields)
    whole, n = inputs_of(mine), batch.sequences // 2
    cut = [slice(0, n), slice(n, None)]
    parts = [{k: v[c] if v.ndim else v for k, v in whole.items()} for c in cut]
    assert int(parts[0]["completion_mask"].sum()) != int(parts[1]["completion_mask"].sum())
    return pushed(mine, *parts)


def same_as(expected: tuple[torch.Tensor, torch.Tensor], found: tuple[torch.Tensor, torch.Tensor]) -> None:
    same(found[0], expected[0])
    same(found[1], expected[1])
    assert int((expected[1] != 0).sum()) >= 20


@pytest.mark.parametrize("mode", ["correct", "loss"])
def test_a_token_that_the_engine_could_not_score_pushes_nothing_and_is_counted(mode):
    batch = random_batch(4, far=False)
    where = (0, 3)
    assert batch.mask[where] == 1
    hurt = batch.rollout.clone()
    hurt[where] = math.nan
    row = method("segment_tis")
    mine = ours(batch, row, mode, loss_type="grpo")
    loss, gradient = pushed(mine, inputs_of(mine, sampling_per_token_logps=hurt))
    assert gradient[where] == 0
    assert int((gradient != 0).sum()) > 20
    assert math.isfinite(loss)
    assert float(mine.trainer._unscored) == 1
    assert mine.trainer.offdrift.end_step(1)["offdrift/batch/tokens"] == batch.tokens - 1


@pytest.mark.parametrize("mode", ["correct", "loss"])
def test_a_micro_batch_without_any_token_that_trains(mode):
    """As `mask_truncated_completions` makes it, or an engine that scored none."""
    batch = sequence_batch(0)
    masked = {"completion_mask": torch.zeros_like(batch.mask)}
    for nothing in (masked, {"sampling_per_token_logps": torch.full_like(batch.rollout, math.nan)}):
        mine = ours(batch, METHODS["decoupled_token_is"], mode, loss_type="grpo")
        loss, gradient = pushed(mine, inputs_of(mine, **nothing))
        assert float(loss) == float(gradient.abs().max()) == 0


def test_tools_split_turns():
    """A turn ends where a tool wrote; `segment_tis` weights turns."""
    tool = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
    present = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]])
    rollout, old = torch.full((3, 6), -1.0), -1.0 + 0.1 * torch.arange(18.0).reshape(3, 6) / 10
    inputs = {
        "completion_mask": present,
        "tool_mask": tool,
        "sampling_per_token_logps": rollout,
        "old_per_token_logps": old,
        "advantages": torch.ones(3),
    }
    piece = piece_of(inputs, old.clone(), torch.zeros(3, 6), vocab=9, version=0)
    assert piece is not None
    lp = piece.logprobs
    assert lp.segments.lengths.tolist() == [4, 4, 0]
    assert lp.segments.turns is not None
    assert lp.segments.turns.lengths.tolist() == [2, 2, 1, 3]
    found = method("segment_tis").correction(lp, piece.advantages).weight
    means = [0.005, 0.045, 0.06, 0.09]  # of l over each turn
    expected = torch.tensor(means).repeat_interleave(torch.tensor([2, 2, 1, 3])).exp()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("used", [True, False], ids=["corrected by TRL", "not by TRL"])
def test_evaluation_is_trls(used):
    """Its own correction of vLLM's log-probs included, which is off in our training steps."""
    batch, limits = sequence_batch(2, sequences=20), by_vllm("token_truncate", clip_max=1.2, clip_min=0.8)
    limits["vllm_importance_sampling_correction"] = used
    peer = theirs(batch, loss_type="dapo", num_iterations=2, **limits)
    mine = ours(batch, METHODS["decoupled_token_is"], loss_type="dapo", **limits)
    peer.trainer.model = type(peer.trainer.model)(training=False, is_gradient_checkpointing=False)
    mine.trainer.model = type(mine.trainer.model)(**{**vars(mine.trainer.model), "training": False})
    for trainer in (peer.trainer, mine.trainer):
        trainer.args.per_device_eval_batch_size, trainer.num_generations_eval = None, trainer.num_generations
    expected, inputs = peer.generated(), mine.generated()
    assert ("importance_sampling_ratio" in inputs) is ("importance_sampling_ratio" in expected) is used
    loss, gradient = peer.loss(expected)
    found, slope = mine.loss(inputs)
    same(found, loss)
    same(slope, gradient)
    assert mine.trainer.vllm_importance_sampling_correction is False
    assert mine.trainer.offdrift._stats is None


def made(row: Method, mode: str = "correct", **fields: Any) -> None:
    from offdrift.adapters.trl import refuse_method

    refuse_method(row, mode)  # type: ignore[arg-type]
    ours(sequence_batch(0), row, mode, **fields)


def test_what_cannot_mean_anything_is_refused():
    with pytest.raises(MethodError, match="may only be on the mismatch"):
        made(method("token_tis"))
    with pytest.raises(MethodError, match=r'neither gates nor weights.*mode="loss"'):
        made(method("gspo"))
    with pytest.raises(MethodError, match="replaces the old policy"):
        made(method("a3po"))
    for mode in ("correct", "loss"):
        with pytest.raises(EvidenceError, match="trm_max_k2"):
            made(method("trm_max"), mode)
    with pytest.raises(MethodError, match="penalty=None"):
        made(method("deepseek_v32"), "loss")
    with pytest.raises(MethodError, match="learning rate"):
        made(method("vcpo"), "loss")
    made(override(method("token_tis"), {"weight.on": "mismatch"}))
    made(replace(method("deepseek_v32"), penalty=None), "loss")


def test_settings_that_our_loss_would_drop_are_refused():
    dropped = {"off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.2, "delta": 4.0}
    for name, value in {**dropped, "importance_sampling_level": "sequence"}.items():
        with pytest.raises(MethodError, match=f"{name}.*correct"):
            made(method("token_tis"), "loss", **{name: value})
        made(METHODS["decoupled_token_is"], "correct", **{name: value})


def test_a_step_that_cannot_be_seen_whole_is_refused():
    late = {"steps_per_generation": 3, "gradient_accumulation_steps": 2}
    with pytest.raises(MethodError, match=r"steps_per_generation=3.*gradient_accumulation_steps=2"):
        made(method("token_tis"), "loss", **late)
    with pytest.raises(MethodError, match="must see it whole"):
        made(override(method("normalized_tis"), {"weight.on": "mismatch"}), **late)
    made(method("gspo"), "loss", **late)
    made(METHODS["decoupled_token_is"], **late)


def test_a_correction_without_the_engines_log_probs_is_refused():
    blind = {"use_vllm": False, "rollout_func": None}
    for row, mode in (("decoupled_token_is", "correct"), ("token_tis", "loss"), ("geo_mask", "correct")):
        with pytest.raises(LivenessError, match="use_vllm=True, or give a rollout_func"):
            made(method(row), mode, **blind)
    made(method("gspo"), "loss", **blind)  # reads the staleness alone
