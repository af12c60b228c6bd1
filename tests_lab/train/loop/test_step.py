"""One optimizer step: the same gradient however the batch is cut, bounded memory, safe refusals."""

from __future__ import annotations

import copy
import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from tests.judge.proxies import variance_proxies

from offdrift.advantages import advantages
from offdrift.batch_info import BatchInfo
from offdrift.certificate import TrustRegion
from offdrift.certificate.batch import COLUMNS, BatchEvidence
from offdrift.certificate.certify import certify
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.score import chunks, divergences, left_right_padded, score
from offdrift.errors import EngineError, RecipeError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, override
from offdrift.models import tiny_qwen3_config
from offdrift.penalty import Adaptive, KLPenalty
from offdrift.records import Sampling, TopK
from offdrift.stats import summarize
from offdrift_lab.train.loop.arm import Arm
from offdrift_lab.train.loop.batch import Batch, Scores, StreamedBatch, token_advantages
from offdrift_lab.train.loop.loop import minibatches, train
from offdrift_lab.train.loop.old_policy import score_batch
from offdrift_lab.train.loop.step import gather_evidence
from tests_lab.train.conftest import short_arms, small_recipe
from tests_lab.train.loop.test_loop import rows
from tests_lab.train.steps import stepped

step_module = importlib.import_module("offdrift_lab.train.loop.step")
loop_module = importlib.import_module("offdrift_lab.train.loop.loop")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# thresholds that keep some of the batch below and reject some
GATES = {"trm_max": {"gate.high": 0.02}, "trm_avg_k3": {"gate.high": 0.01}}
# thresholds at which the step-wide statistic acts on so small a batch
CHANGES = {
    **GATES,
    "m2po": {"objective.budget": 1e-6, "objective.floor_low": 1e-6, "objective.floor_high": 1e-6},
    "clip_cov": {"objective.fraction": 0.2, "objective.cov_low": 0.0, "objective.cov_high": 1e9},
    # smooth: at ratio 1 the sign in the gradient of |log r| would be that of rounding
    "kl_cov": {"objective.fraction": 0.2, "objective.penalty": "k2"},
    "st_ppo": {"objective.eps_low": 1e-4, "objective.eps_high": 1e-4},
}


@pytest.fixture(scope="module")
def drawing():
    """A tiny model, and how a stale, coarser copy of it draws a ragged batch with some evidence."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    config = tiny_qwen3_config()
    config.num_hidden_layers, config.initializer_range = 2, 0.15
    model = Qwen3ForCausalLM(config)
    stale = copy.deepcopy(model)
    with torch.no_grad():
        for p in stale.parameters():
            p += 0.02 * p.std() * torch.randn_like(p)
    engine = TransformersEngine(stale, dtype="bfloat16")
    prompts = [[5, 6, 7][: 1 + i % 3] for i in range(12)]
    sampling = Sampling(max_tokens=9, stop_token_ids=tuple(range(10)))
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))

    def draw(evidence: str, **filters):
        rollouts = engine.generate(prompts, replace(sampling, **filters), seed=1, evidence=evidence)
        return rollouts.with_(rewards=rewards, group_ids=torch.arange(12) // 4)

    return model, draw


@pytest.fixture(scope="module")
def world(drawing):
    """The model, and a batch with the whole distribution of every token."""
    model, draw = drawing
    rollouts = draw("full")
    assert len(set(rollouts.lengths.tolist())) > 3
    return model, Batch(rollouts=rollouts, advantages=advantages(rollouts.rewards, rollouts.segments))


@pytest.fixture(scope="module")
def filtered(drawing):
    """The same drawn by top-p."""
    model, draw = drawing
    rollouts = draw("full", top_p=0.7)
    assert len(set(rollouts.lengths.tolist())) > 3
    assert 3 < rollouts.support.cu_seqlens.diff().double().mean() < 50
    return model, Batch(rollouts=rollouts, advantages=advantages(rollouts.rewards, rollouts.segments))


def taken(model, batch: Batch, row, *, lr: float = 1.0, token_budget: int = 30, max_grad_norm: float = 1e9, **options):
    """One step of SGD, in place."""
    optimizer, limits = torch.optim.SGD(model.parameters(), lr=lr), {"max_grad_norm": max_grad_norm}
    update = stepped(
        Accelerator(cpu=True), model, optimizer, batch, row, token_budget=token_budget, **limits, **options
    )
    assert optimizer.param_groups[0]["lr"] == lr
    return update


def step(world, name: str, *, token_budget: int, **options):
    """A copy of the model after the step of a method, and the update."""
    model, batch = copy.deepcopy(world[0]), world[1]
    row = override(METHODS[name], CHANGES.get(name, {}))
    if row.needs_old:
        batch = replace(batch, old=score_batch(model, batch.rollouts, token_budget=64))
    if row.needs_reference:
        batch = replace(batch, logp_ref=batch.rollouts.logp_rollout)  # some other policy
    return model, taken(model, batch, row, token_budget=token_budget, **options)


LOOKS_AHEAD = ["normalized_tis", "m2po", "clip_cov", "kl_cov", "st_ppo", "oapl", "quatro", "r2vpo_clip", "online_dpo"]


@pytest.mark.parametrize(
    ("name", "token_budget", "drawn"),
    [(n, b, "world") for n in ("none", "token_tis", "seq_tis", "trm_max", "trm_avg_k3") for b in (1, 30, 64)]
    + [(n, 30, "world") for n in LOOKS_AHEAD]
    + [(n, 30, "filtered") for n in ("seq_tis", "trm_max", "decoupled_ppo", "kl_cov")],
)
def test_accumulation_by_token_budget_gives_the_gradient_of_one_big_batch(request, name, token_budget, drawn):
    world = request.getfixturevalue(drawn)
    whole, once = step(world, name, token_budget=10_000)
    cut, many = step(world, name, token_budget=token_budget)
    assert len(list(chunks(world[1].rollouts, token_budget=token_budget))) > 1
    compared = 0
    for a, b, start in zip(whole.parameters(), cut.parameters(), world[0].parameters()):
        torch.testing.assert_close(a - start, b - start, rtol=1e-3, atol=2e-6)
        compared += a.numel()
    assert compared > 200_000
    assert max((a - b).abs().max() for a, b in zip(whole.parameters(), world[0].parameters())) > 1e-3
    expected, got = summarize(once.stats), summarize(many.stats)
    assert got.keys() == expected.keys()
    assert name not in GATES or 0 < got["gate/acceptance_seq"] < 1
    for key in expected:
        assert got[key] == pytest.approx(expected[key], rel=2e-3, abs=1e-5, nan_ok=True), key


STREAMED = ["none", "seq_tis", "trm_max", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "decoupled_token_is"]
"""Every aggregate, gates, weights and clips of every unit, with and without an old policy."""


@pytest.mark.parametrize("name", STREAMED)
def test_parts_that_come_one_by_one_give_the_gradient_of_the_joined_batch(world, name):
    """Parts of unequal size, a prompt whole in each."""
    at_once, streamed = copy.deepcopy(world[0]), copy.deepcopy(world[0])
    row, batch = override(METHODS[name], CHANGES.get(name, {})), world[1]
    if row.needs_old:
        old = score_batch(streamed, batch.rollouts, token_budget=64)
        moved = old.logp - 0.2 * torch.rand(len(old.logp), generator=torch.Generator().manual_seed(1))
        batch = replace(batch, old=replace(old, logp=moved))
    parts = [batch.select(torch.arange(a, b)) for a, b in ((0, 4), (4, 12))]
    assert Batch.joined(parts).advantages.equal(batch.advantages)
    options = {"token_budget": 30, "view": True, "region": TrustRegion(horizon=9, delta=0.05)}
    whole = taken(at_once, batch, row, **options)
    came = []
    update = taken(streamed, StreamedBatch(coming=(came.append(part) or part for part in parts)), row, **options)
    assert len(came) == 2
    compared = 0
    for a, b, start in zip(at_once.parameters(), streamed.parameters(), world[0].parameters()):
        torch.testing.assert_close(a - start, b - start, rtol=1e-3, atol=2e-6)
        compared += a.numel()
    assert compared > 200_000
    expected, got = summarize(whole.stats), summarize(update.stats)
    assert got.keys() == expected.keys()
    for key in expected:
        assert got[key] == pytest.approx(expected[key], rel=2e-3, abs=1e-5, nan_ok=True), key
    torch.testing.assert_close(update.tokens.logp, whole.tokens.logp)
    assert update.tokens.keep.equal(whole.tokens.keep)
    assert update.evidence is not None


def test_a_method_that_looks_at_the_whole_step_refuses_parts(world):
    with pytest.raises(EngineError, match="join them"):
        taken(copy.deepcopy(world[0]), StreamedBatch(coming=iter([world[1]])), METHODS["normalized_tis"])


def test_every_sequence_is_scored_exactly_once(world):
    rollouts = world[1].rollouts
    for budget in (1, 25, 64, 1000):
        pieces = list(chunks(rollouts, token_budget=budget))
        assert sorted(torch.cat(pieces).tolist()) == list(range(12))
        for piece in pieces:
            padded = left_right_padded(rollouts.select(piece))
            assert padded.ids.numel() <= budget or len(piece) == 1


def test_the_view_shows_each_token_in_the_batchs_order(world):
    model, batch = world
    _, update = step(world, "trm_max", token_budget=30, view=True)
    assert update.tokens is not None
    row = override(METHODS["trm_max"], {"gate.high": 0.02})
    with torch.no_grad():
        kl = divergences(batch.rollouts, score(model, batch.rollouts).logits)["kl_rollout_current"].lo
    torch.testing.assert_close(update.tokens.divergence("kl_rollout_current"), kl, rtol=1e-3, atol=1e-6)
    worst = batch.rollouts.segments.max(kl)
    kept = batch.rollouts.segments.max(update.tokens.keep.float()) > 0
    assert kept.tolist() == (worst <= row.correction.gates[0].high).tolist()


def test_rejecting_everything_takes_a_step_of_zero(world):
    model = copy.deepcopy(world[0])
    found = summarize(taken(model, world[1], override(METHODS["trm_max"], {"gate.high": 0.0})).stats)
    assert found["gate/acceptance_seq"] == 0.0
    assert found["optim/loss"] == found["optim/grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), world[0].parameters()))


def test_a_gradient_that_is_no_number_stops_before_the_weights_change(world, monkeypatch):
    model = copy.deepcopy(world[0])
    next(model.parameters()).register_hook(lambda g: g * float("nan"))
    with pytest.raises(EngineError, match="gradient norm is nan"):
        taken(model, world[1], METHODS["none"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), world[0].parameters()))


def test_old_log_probs_are_the_models_own_with_entropy_squares_and_divergences(world):
    model, batch = world
    old = score_batch(model, batch.rollouts, token_budget=30, exact=True)
    with torch.no_grad():
        scored = score(model.eval(), batch.rollouts)
    p = scored.logits.softmax(-1)
    torch.testing.assert_close(old.logp, scored.logp, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(old.entropy, -torch.special.xlogy(p, p).sum(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(old.sum_pi_squared, p.square().sum(-1), rtol=1e-4, atol=1e-6)
    assert set(old.divergences) == {"kl_rollout_old", "tv_rollout_old"}
    assert (old.divergences["kl_rollout_old"].lo > 0).any()
    part = old.select(torch.tensor([2, 0]))
    assert part.logp.tolist() == old.logp[[2, 0]].tolist()
    assert part.divergences["kl_rollout_old"].hi.tolist() == old.divergences["kl_rollout_old"].hi[[2, 0]].tolist()


@pytest.mark.parametrize(("drawn", "filters"), [("world", {}), ("filtered", {"top_p": 0.7})])
def test_hidden_states_assess_and_step_as_full_rows_do_however_the_batch_is_cut(request, drawing, drawn, filters):
    world = model, batch = request.getfixturevalue(drawn)
    full, hidden = batch.rollouts, drawing[1]("hidden", **filters)
    assert torch.equal(full.tokens, hidden.tokens)
    expected = score_batch(model, full, token_budget=1000, exact=True).divergences
    found = score_batch(model, hidden, token_budget=30, exact=True).divergences
    assert found.keys() == expected.keys() == {"kl_rollout_old", "tv_rollout_old"}
    for name, d in found.items():
        assert d.name == name
        assert str(d.grade) == "exact"
        torch.testing.assert_close(d.lo, expected[name].lo, rtol=1e-3, atol=1e-6)
    _, with_rows = step(world, "trm_max", token_budget=30, view=True)
    states = (model, replace(batch, rollouts=hidden))
    _, with_states = step(states, "trm_max", token_budget=30, view=True)
    torch.testing.assert_close(
        with_states.tokens.divergence("kl_rollout_current"),
        with_rows.tokens.divergence("kl_rollout_current"),
        rtol=1e-3,
        atol=1e-6,
    )
    assert torch.equal(with_states.tokens.keep, with_rows.tokens.keep)
    assert with_states.stats.grade == "exact"


def test_what_an_upper_end_assumes_stays_with_it(world):
    model, batch = world
    rows = batch.rollouts.evidence.logp
    top = rows.topk(5)
    rollouts = batch.rollouts.with_(evidence=TopK(top.indices, top.values))
    old = score_batch(model, rollouts, token_budget=30, exact=True, tail_log_ratio_cap=0.5)
    free = score_batch(model, rollouts, token_budget=30, exact=True)
    kl = old.divergences["kl_rollout_old"]
    assert kl.assumes
    assert free.divergences["kl_rollout_old"].assumes is None
    assert (kl.hi <= free.divergences["kl_rollout_old"].hi).all()
    assert (kl.hi < free.divergences["kl_rollout_old"].hi).any()
    part = old.select(torch.tensor([2, 0])).divergences["kl_rollout_old"]
    assert part.assumes == kl.assumes
    assert part.refuted.tolist() == kl.refuted[[2, 0]].tolist()
    capped = Batch(rollouts=rollouts, advantages=batch.advantages, old=old, tail_log_ratio_cap=0.5)
    assert capped.select(torch.tensor([1])).tail_log_ratio_cap == 0.5
    row, uncapped = (
        override(METHODS["trm_max"], {"gate.high": 0.02}),
        replace(capped, old=free, tail_log_ratio_cap=None),
    )
    for batch, grade in ((capped, "capped interval"), (uncapped, "interval")):
        assert taken(model, batch, row, lr=0.0).stats.grade == grade


def test_gates_on_the_exact_mismatch_get_their_divergences(world):
    model, batch = copy.deepcopy(world[0]), world[1]
    old = score_batch(model, batch.rollouts, token_budget=64, exact=True)
    worst = batch.rollouts.segments.max(old.divergences["kl_rollout_old"].lo)
    limit = float(worst.median())
    row = override(METHODS["trm_max"], {"gate.on": "mismatch", "gate.high": limit})
    update = taken(model, replace(batch, old=old), row, lr=0.0)
    expected = (worst <= limit).float().mean().item()
    assert summarize(update.stats)["gate/acceptance_seq"] == pytest.approx(expected)
    assert 0 < expected < 1


def test_the_learning_rate_of_one_step_is_scaled_by_ess_and_put_back(world):
    """VCPO: sqrt of the effective share of the sequence weights, by hand from the batch."""
    start, batch = world
    with torch.no_grad():
        logp = score(start.eval(), batch.rollouts).logp
    segments = batch.rollouts.segments
    w = segments.sum(logp - batch.rollouts.logp_rollout).exp().clamp(max=2.0)
    scale = (w.sum() ** 2 / (len(w) * w.square().sum())).sqrt().item()
    assert 0.2 < scale < 0.99
    moves = {}
    for name, budget in (("seq_tis", 1000), ("vcpo", 1000), ("vcpo", 30)):
        model, update = step(world, name, token_budget=budget)
        moves[name, budget] = [a.detach() - b.detach() for a, b in zip(model.parameters(), start.parameters())]
        wanted = scale if name == "vcpo" else 1.0
        assert summarize(update.stats)["optim/lr_scale"] == pytest.approx(wanted, rel=1e-4)
    for whole, scaled, cut in zip(*moves.values()):
        torch.testing.assert_close(scaled, scale * whole, rtol=2e-3, atol=2e-6)
        torch.testing.assert_close(cut, scaled, rtol=2e-3, atol=2e-6)


def test_methods_that_adapt_hand_on_their_successor(world):
    _, update = step(world, "r2vpo", token_budget=30)
    before, after = METHODS["r2vpo"].objective, update.method.objective
    assert type(before) is type(after)
    assert before.penalty != after.penalty
    assert override(METHODS["r2vpo"], update.method.changes(METHODS["r2vpo"])) == update.method
    _, update = step(world, "token_tis", token_budget=30)
    assert update.method == METHODS["token_tis"]
    assert update.evidence is None, "no region was given"


def test_a_penalty_in_the_reward_is_paid_by_what_is_likelier_than_under_the_reference(world):
    """R - 0.5 sum (log pi - log pi_ref) of each sequence, minus the mean of its group, by hand."""
    model, rollouts = world[0], world[1].rollouts
    trainer = score_batch(model, rollouts, token_budget=64)
    ref = (trainer.logp - torch.rand(len(trainer.logp), generator=torch.Generator().manual_seed(1))).clamp(max=0.0)
    settings = small_recipe().model_copy(update={"reward_range": (-5.0, 5.0)})
    penalty = {"penalty.place": "reward", "penalty.estimator": "k1", "penalty.coef": 0.5}
    arm = object.__new__(type("Bare", (Arm,), {"estimator": "dr_grpo", "advantages_read_gates": False, "critic": None}))
    arm.method = override(METHODS["deepseek_v32"], penalty)
    arm.run = SimpleNamespace(recipe=settings, sum=lambda x: x)
    found, _ = token_advantages(arm, rollouts, Scores(trainer=trainer, logp_ref=ref))
    total = rollouts.rewards - 0.5 * rollouts.segments.sum(trainer.logp - ref)
    centered = (total.view(3, 4) - total.view(3, 4).mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(found, rollouts.segments.spread(centered), rtol=1e-4, atol=1e-5)


def test_a_penalty_pulls_to_the_reference_and_its_controller_moves(world):
    model, batch = copy.deepcopy(world[0]), world[1]
    with torch.no_grad():
        logp = score(model.eval(), batch.rollouts).logp
    ref = (logp - 0.5).clamp(max=0.0)
    controller = Adaptive(target=0.01, horizon=100.0)
    row = replace(METHODS["none"], penalty=KLPenalty(estimator="k2", coef=0.5, controller=controller))
    flat = replace(batch, advantages=torch.zeros_like(logp), logp_ref=ref)
    update = taken(model, flat, row, lr=0.0)
    found = summarize(update.stats)
    assert found["reference/kl"] == pytest.approx(0.125, rel=1e-4)  # 0.5^2 / 2
    assert found["optim/loss"] == pytest.approx(0.5 * 0.125, rel=1e-4)
    assert found["optim/grad_norm"] > 0
    assert update.method.penalty.coef == pytest.approx(0.5 * (1 + 0.2 * 12 / 100))


# -- evidence for a certificate ---------------------------------------------------------------

REGION = TrustRegion(horizon=9, delta=0.02, eps=0.08, tau=0.05)


def whole_evidence(world) -> BatchEvidence:
    """The batch in one piece, from its logits; the gate of `trm_max` keeps tokens with KL <= 0.02."""
    model, batch = world
    r = batch.rollouts
    with torch.no_grad():
        said = score(model.eval(), r)
        known = divergences(r, said.logits)
    lp = LogProbs.pack(r.logp_rollout, said.logp, segments=r.segments)
    keep = r.segments.spread(r.segments.max(known["kl_rollout_current"].lo)) <= 0.02
    assert 0 < keep.sum() < len(keep)
    return BatchEvidence.of(lp, r.rewards, region=REGION, divergences=known, keep=keep)


@pytest.mark.parametrize("token_budget", [1, 30, 10_000])
def test_the_evidence_of_a_step_is_that_of_the_whole_batch(world, token_budget):
    """Of the policy before the step, however the batch was cut."""
    expected, rollouts = whole_evidence(world), world[1].rollouts
    moved, update = step(world, "trm_max", token_budget=token_budget, region=REGION)
    found = update.evidence
    assert found is not None
    assert any(not torch.equal(a, b) for a, b in zip(moved.parameters(), world[0].parameters()))
    order = torch.cat(list(chunks(rollouts, token_budget=token_budget)))
    assert found.columns.shape == (12, len(COLUMNS))
    torch.testing.assert_close(found.columns, expected.columns[order], rtol=1e-3, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(found.tv_by_position, expected.tv_by_position, rtol=1e-3, atol=1e-6)
    assert torch.equal(found.group_ids, rollouts.group_ids[order])
    assert found.region == REGION
    assert found.grades == expected.grades
    assert 0 < found.column("kept").sum() < 12
    limits = {"reward_range": (-5.0, 5.0)}
    assert certify(found, **limits).prompts == 3
    assert certify(found, **limits).gain_low == pytest.approx(certify(expected, **limits).gain_low, rel=1e-4)


@pytest.mark.parametrize("name", ["token_tis", "trm_max"])
def test_the_proxies_of_the_gradients_noise_are_those_of_the_whole_batch(world, name):
    model, batch = world[:2]
    scored = score(model, batch.rollouts)
    lp = LogProbs.pack(batch.rollouts.logp_rollout, scored.logp.detach(), segments=batch.rollouts.segments)
    row = override(METHODS[name], CHANGES.get(name, {}))
    _, update = step(world, name, token_budget=30)
    found = summarize(update.stats)
    decided = row.correction(lp, batch.advantages, BatchInfo(divergences=divergences(batch.rollouts, scored.logits)))
    assert bool(decided.keep.all()) == (name == "token_tis")
    expected = variance_proxies(
        scored.sum_pi_squared,
        lp.current,
        batch.advantages,
        lp.segments,
        grad_norm=found["optim/grad_norm"],
        weight=decided.weight.where(decided.keep, 0.0),
    )
    assert expected["variance_proxy/proxy2_total_power"] > 0
    for metric, x in expected.items():
        assert found[metric] == pytest.approx(x, rel=1e-5), metric


def test_a_loss_scale_changes_no_digit_of_a_step(world):
    """Powers of two pass through a gradient exactly."""
    (plain, one), (scaled, two) = (step(world, "trm_max", token_budget=40, loss_scale=s) for s in (None, 2.0**12))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(plain.parameters(), world[0].parameters(), strict=True))
    one, two = summarize(one.stats), summarize(two.stats)
    assert one["optim/grad_norm"] == two["optim/grad_norm"]
    assert (two["optim/loss_scale"], two["optim/skipped"]) == (4096.0, 0.0)
    assert "optim/skipped" not in one


def test_a_step_whose_scaled_gradient_overflows_is_skipped(world):
    """Nothing learns from it: neither the weights nor a method that adapts."""
    model, update = step(world, "r2vpo", token_budget=40, loss_scale=2.0**127)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), world[0].parameters(), strict=True))
    assert summarize(update.stats)["optim/skipped"] == 1.0
    assert update.method == METHODS["r2vpo"]
    assert step(world, "r2vpo", token_budget=40)[1].method != METHODS["r2vpo"]


class Process(Accelerator):
    """One of two, as far as gathering looks."""

    num_processes, process_index = 2, 0

    def __init__(self, index: int) -> None:
        self.process_index = index


def test_the_evidence_of_several_processes_keeps_their_prompts_apart(world, monkeypatch):
    """Both number their prompts from 0; every process gets both halves, in the same order."""
    whole = whole_evidence(world)

    def part(rows: slice, share: float, first_id: int) -> BatchEvidence:
        return replace(
            whole,
            columns=whole.columns[rows],
            group_ids=whole.group_ids[rows] - first_id,
            tv_by_position=whole.tv_by_position * share,
        )

    assert whole.group_ids.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    pieces = [[part(slice(0, 3), 0.25, 0), part(slice(3, 8), 0.25, 0)], [part(slice(8, 12), 0.5, 2)]]
    sent: list[BatchEvidence] = []
    monkeypatch.setattr(step_module, "gather_object", lambda mine: sent.extend(mine) or mine)
    for index in (0, 1):
        gather_evidence(Process(index), pieces[index])
    assert [len(s) for s in sent] == [8, 4]
    monkeypatch.setattr(step_module, "gather_object", lambda mine: sent)
    found = [gather_evidence(Process(index), pieces[index]) for index in (0, 1)]
    for each in found:
        assert torch.equal(each.columns.nan_to_num(-1), whole.columns.nan_to_num(-1))
        torch.testing.assert_close(each.tv_by_position, whole.tv_by_position)
        assert each.group_ids.unique(return_counts=True)[1].tolist() == [4, 4, 4]
        assert torch.equal(each.group_ids, found[0].group_ids)
    ours, theirs = (certify(e, reward_range=(-5.0, 5.0)) for e in (found[0], whole))
    assert ours.prompts == theirs.prompts == 3
    assert ours.gain_low == pytest.approx(theirs.gain_low, rel=1e-12)
    assert pieces[1][0].group_ids.tolist() == [0, 0, 0, 0], "what was given is left as it was"


def test_evidence_without_groups_and_of_one_process_is_gathered_as_it_is(world, monkeypatch):
    whole = whole_evidence(world)
    alone = gather_evidence(Accelerator(cpu=True), [whole])
    assert torch.equal(alone.columns.nan_to_num(-1), whole.columns.nan_to_num(-1))
    assert torch.equal(alone.group_ids, whole.group_ids)
    monkeypatch.setattr(step_module, "gather_object", lambda mine: mine * 2)
    both = gather_evidence(Process(1), [replace(whole, group_ids=None)])
    assert both.group_ids is None
    assert len(both) == 24


def test_only_the_first_update_on_a_batch_is_certified_as_fresh(tmp_path):
    """Two epochs of two minibatches: whoever comes later has learned from the batch's prompts."""
    train(small_recipe(batches=2, optim={"lr": 2e-4, "epochs": 2, "minibatches": 2}), tmp_path / "run")
    found = rows(tmp_path / "run")
    assert [row["certificate/fresh"] for row in found] == [True, False, False, False] * 2
    assert [row["certificate/look"] for row in found] == [1] * 4 + [2] * 4, "a batch is one look"
    for row in found:
        assert row["certificate/verdict"].startswith("no certificate: ")
        stale = "learned from these very prompts" in row["certificate/verdict"]
        assert stale is not row["certificate/fresh"]
        assert (row["certificate/gain_low"] is None) is stale
        assert row["certificate/certified"] == 0.0


def test_a_policy_learns_to_prefer_what_earned_more(world):
    """Repeated steps on one batch: of every pair, the better answer gains on the worse."""
    model = copy.deepcopy(world[0])
    batch = replace(world[1], logp_ref=score_batch(model, world[1].rollouts, token_budget=64).logp)
    steps = [summarize(taken(model, batch, METHODS["online_dpo"], lr=0.3).stats) for _ in range(8)]
    margins = [row["preference/margin"] for row in steps]
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins == sorted(margins)
    assert steps[-1]["preference/accuracy"] == pytest.approx(1)
    assert steps[-1]["preference/pair_frac"] == pytest.approx(1)


def test_answers_to_a_prompt_stay_in_one_minibatch():
    recipe, groups = (
        small_recipe(optim={"epochs": 2, "minibatches": 3}),
        torch.tensor([9, 4, 4, 2, 9, 7, 4, 5, 5, 5, 5]),
    )
    for index in range(5):
        parts = list(minibatches(recipe, index, groups))
        assert [epoch for epoch, _ in parts] == [0, 0, 0, 1, 1, 1]
        for epoch in (0, 1):
            chosen = [x for e, x in parts if e == epoch]
            assert sorted(torch.cat(chosen).tolist()) == list(range(11))
            assert sorted(groups[x].unique().numel() for x in chosen) == [1, 2, 2]
        assert [x.tolist() for _, x in parts[:3]] != [x.tolist() for _, x in parts[3:]]


def test_what_compares_the_answers_to_a_prompt_is_stepped_on_whole_prompts():
    assert {name for name, row in METHODS.items() if row.whole_prompts} == {"oapl", "online_dpo", "quatro", "real"}


def test_online_dpo_runs_on_whole_prompts_and_a_recipe_without_them_is_refused(tmp_path, monkeypatch):
    short_arms(monkeypatch)
    sizes, step = [], loop_module.train_step

    def watched(arm, batch, **options):
        sizes.append(batch.rollouts.group_ids.unique(return_counts=True)[1].tolist())
        return step(arm, batch, **options)

    monkeypatch.setattr(loop_module, "train_step", watched)
    arms = {"online_dpo": {"method": "online_dpo"}}
    train(small_recipe(batches=2, optim__minibatches=2, optim__token_budget=60, arms=arms), tmp_path)
    assert sizes == [[4, 4]] * 4
    first, *rest = rows(tmp_path, "online_dpo")
    assert first["preference/margin"] == pytest.approx(0, abs=1e-6)
    assert all(0 < row["preference/pair_frac"] <= 1 and abs(row["preference/margin"]) > 1e-7 for row in rest)
    with pytest.raises(RecipeError, match=r"minibatches = 5 is more than rollout\.prompts = 4"):
        small_recipe(optim__minibatches=5, arms=arms)
    with pytest.raises(RecipeError, match=r"rollout\.samples = 1"):
        small_recipe(rollout__samples=1, arms=arms)
