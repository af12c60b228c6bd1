"""The transformers engine: the contract, and what only it promises."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer

from offdrift.engines import hf_decode
from offdrift.engines.generate import responses_of
from offdrift.engines.grids import int8, matrices
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.hf_decode import KEPT_SHARE, DrawRecorder, InPlaceLayer, branched, inverted
from offdrift.engines.output_head import deviations
from offdrift.errors import EngineError
from offdrift.records.provenance import Sampling
from tests.engines.contract import PLAIN, PROMPTS, EngineContract
from tests.engines.models import SMALLER, VOCAB, tiny
from tests.engines.oracles import logp_rows


@pytest.fixture(
    scope="class",
    params=[("dense", {}), ("moe", {}), ("dense", {"dtype": "bfloat16"}), ("moe", {"quantization": "int8"})],
    ids=["dense-fp32", "moe-fp32", "dense-bf16", "moe-int8"],
)
def built(request):
    kind, options = request.param
    model = tiny(kind)
    return model, TransformersEngine(model, **options), not options


class TestContract(EngineContract):
    """All of it."""


def exact_against(model, engine, sampling=PLAIN):
    """Assert that the engine samples the model's own distribution, to float32 rounding."""
    rollouts = engine.generate(PROMPTS, sampling, seed=1, evidence="full")
    truth = logp_rows(model, rollouts, sampling)
    assert len(truth) == len(rollouts.tokens) > 0
    torch.testing.assert_close(rollouts.evidence.logp.double(), truth, atol=1e-4, rtol=0)


# -- its own copy ---------------------------------------------------------------------------------


def test_dropout_train_mode_and_checkpointing_of_the_trainer_do_not_reach_the_engine():
    model = tiny("dense")
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    model.gradient_checkpointing_enable()
    engine = TransformersEngine(model)
    assert model.training
    assert model.is_gradient_checkpointing
    assert not engine.model.is_gradient_checkpointing
    exact_against(tiny("dense"), engine)


def test_gradients_and_updates_of_the_trainer_do_not_reach_the_engine_until_loaded():
    model = tiny("dense")
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    engine = TransformersEngine(model)
    assert all(p.grad is None and not p.requires_grad for p in engine.model.parameters())
    assert all(p.grad is not None and p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * weight.roll(1, 0))
    exact_against(tiny("dense"), engine)
    engine.load_weights(model.named_parameters(), version=7)
    exact_against(model, engine)
    assert engine.version == 7


def test_the_models_own_generation_settings_do_not_leak():
    model = tiny("dense")
    model.generation_config = GenerationConfig(
        do_sample=True,
        top_k=3,
        top_p=0.5,
        temperature=0.3,
        repetition_penalty=2.0,
        eos_token_id=list(range(0, VOCAB, 2)),
        min_new_tokens=2,
        suppress_tokens=[5],
    )
    exact_against(model, TransformersEngine(model))
    assert model.generation_config.top_k == 3


def test_a_reduced_dtype_keeps_ties_and_the_rotary_frequencies():
    engine = TransformersEngine(tiny("dense"), dtype="bfloat16")
    weights = dict(engine.model.named_parameters(remove_duplicate=False))
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
    assert engine.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_checkpoint_folder_gives_the_same_engine_as_its_model(checkpoints):
    exact_against(tiny("moe"), TransformersEngine(checkpoints["moe"]))


class Forwards:
    """Input shapes of a model's forward passes."""

    def __init__(self, model):
        self.shapes = []
        model.register_forward_pre_hook(
            lambda _, args, kw: self.shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True
        )


def test_tokens_do_not_depend_on_the_batch_size():
    sampling = Sampling(max_tokens=5, stop_token_ids=tuple(range(9)))
    small, large = (TransformersEngine(tiny("dense"), batch_size=size) for size in (3, 8))
    forwards = Forwards(small.model)
    exact_against(tiny("dense"), small, sampling)
    assert {rows for rows, _ in forwards.shapes} <= {1, 2, 3}
    a, b = (engine.generate(PROMPTS, sampling, seed=7, evidence="full") for engine in (small, large))
    assert torch.equal(a.tokens, b.tokens)
    torch.testing.assert_close(a.evidence.logp, b.evidence.logp, atol=1e-5, rtol=0)


def test_a_text_is_read_once_and_an_ended_response_is_not_continued():
    engine = TransformersEngine(tiny("dense"))
    forwards = Forwards(engine.model)
    stops = tuple(range(0, VOCAB, 4))
    prompts = [[3, 1, 4]] * 40 + [[1, 5]] * 24
    rollouts = engine.generate(prompts, Sampling(max_tokens=16, stop_token_ids=stops, temperature=0.5), seed=0)
    assert forwards.shapes[0] == (2, 3)
    running = [rows for rows, _ in forwards.shapes[1:]]
    needed, drawn = [set() for _ in running], responses_of(rollouts)
    for prompt, response in zip(prompts, drawn, strict=True):
        for t in range(1, len(response)):
            needed[t - 1].add((*prompt, *response[:t]))
    needed = [len(texts) for texts in needed]
    assert all(n <= rows < n / KEPT_SHARE + 1 for n, rows in zip(needed, running, strict=True)), (needed, running)
    assert sum(running) < 0.8 * sum(len(response) - 1 for response in drawn)


@pytest.mark.parametrize("evidence", ["full", "hidden", 5])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_responses_that_share_what_is_read_are_those_that_are_read_apart(kind, evidence, monkeypatch):
    engine, plain = TransformersEngine(tiny(kind)), Sampling(max_tokens=9, stop_token_ids=(3, 4, 5), temperature=0.4)
    prompts, forwards = [p for p in PROMPTS for _ in range(6)], Forwards(engine.model)
    shared = engine.generate(prompts, plain, seed=4, evidence=evidence)
    followed = engine.rescore(shared, evidence=evidence)
    rows = sum(n for n, _ in forwards.shapes) / 2
    monkeypatch.setitem(hf_decode.CHECK_EVERY, "cpu", 3)  # as on an accelerator: one row per response
    forwards.shapes.clear()
    apart = engine.generate(prompts, plain, seed=4, evidence=evidence)
    assert rows < 0.9 * sum(n for n, _ in forwards.shapes)
    assert torch.equal(shared.tokens, apart.tokens)
    for other in (apart, followed):
        torch.testing.assert_close(shared.logp_rollout, other.logp_rollout, atol=1e-5, rtol=0)
        recorded = "states" if evidence == "hidden" else "logp"
        torch.testing.assert_close(
            getattr(shared.evidence, recorded), getattr(other.evidence, recorded), atol=1e-4, rtol=1e-4
        )


def test_branches_keep_their_text_and_only_equal_ones_share_a_row():
    g = torch.Generator().manual_seed(0)
    moved = 0
    for texts in range(1, 9):
        for responses in range(1, 25):
            text, drawn = (torch.randint(n, (responses,), generator=g) for n in (texts, 3))
            moves, row = branched(text, drawn, texts, 3)
            origin = torch.arange(texts) if moves is None else moves
            moved += moves is not None
            assert torch.equal(origin[row], text)
            assert len(origin) <= max(texts, responses)
            pairs = {*zip(text.tolist(), drawn.tolist(), strict=True)}
            triples = {*zip(text.tolist(), drawn.tolist(), row.tolist(), strict=True)}
            assert len(pairs) == len(triples) == len({*row.tolist()})
    assert 50 < moved < 190


def test_a_cache_in_place_is_that_of_transformers_whatever_rows_it_is_to_have():
    g = torch.Generator().manual_seed(0)
    own, plain = InPlaceLayer(40, rows=9), DynamicLayer()
    rows = 4
    for step in range(30):
        new = torch.rand(2, rows, 2, 1 + step % 2, 3, generator=g)
        for ours, theirs in zip(own.update(*new), plain.update(*new), strict=True):
            assert torch.equal(ours, theirs), step
        rows = (4, 7, 7, 12, 5, 9)[step % 6]
        order = torch.randint(len(new[0]), (rows,), generator=g)
        if step % 3:  # most stay
            order[: min(rows, len(new[0])) - 1] = torch.arange(min(rows, len(new[0])) - 1)
        own.reorder_cache(order)
        plain.reorder_cache(order)


def test_what_was_drawn_can_enter_a_loss():
    rollouts = TransformersEngine(tiny("dense")).generate(PROMPTS, PLAIN, seed=0, evidence="full")
    weight = torch.ones(len(rollouts.tokens), requires_grad=True)
    (weight * rollouts.logp_rollout * rollouts.evidence.logp.sum(1)).sum().backward()
    assert weight.grad is not None
    assert not any(x.is_inference() for x in (rollouts.tokens, rollouts.cu_seqlens, rollouts.rollout_version))


def test_tokens_are_drawn_with_their_probabilities_and_never_one_of_none():
    logp = torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0]).log()
    g = torch.Generator().manual_seed(0)
    drawn = inverted(logp.expand(40_000, 5), torch.rand(40_000, generator=g, dtype=torch.float64))
    counts = torch.bincount(drawn, minlength=5)
    assert counts[1] == counts[4] == 0
    assert ((counts[[0, 2, 3]] / 40_000 - torch.tensor([0.5, 0.25, 0.25])).abs() < 0.012).all()
    edge = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert inverted(logp.expand(2, 5), edge).tolist() == [0, 3]


def test_a_closed_engine_says_so():
    engine = TransformersEngine(tiny("dense"))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="'transformers' is closed"):
        engine.generate(PROMPTS, PLAIN, seed=0)


def test_a_module_that_cannot_generate_is_refused():
    with pytest.raises(EngineError, match=r"Qwen3Model.*unwrap"):
        TransformersEngine(torch.nn.DataParallel(tiny("dense")).module.model)


# -- hidden states -------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_all", [False, True])
def test_hidden_states_of_a_batch_drawn_in_chunks_share_one_head(keeps_all, monkeypatch):
    engine = TransformersEngine(tiny("dense"), batch_size=3)
    if keeps_all:  # the logits, and so the states, of every place of a prompt
        monkeypatch.setattr(engine.model, "_supports_logits_to_keep", lambda: False)
    whole = engine.generate(PROMPTS, PLAIN, seed=3, evidence="hidden")
    assert whole.evidence.states.shape == (96, 64)
    assert deviations(whole.evidence, whole.tokens, whole.logp_rollout).max() < 1e-5
    again = engine.rescore(whole, evidence="hidden")
    torch.testing.assert_close(again.logp_rollout, whole.logp_rollout, atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_of_a_capped_and_tied_head_are_the_full_rows(dtype):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = SMALLER | {"num_hidden_layers": 1, "initializer_range": 0.5, "final_logit_softcapping": 5.0}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes))
    engine = TransformersEngine(model, dtype=dtype)
    hidden = engine.generate(PROMPTS, PLAIN, seed=3, evidence="hidden").evidence
    full = engine.generate(PROMPTS, PLAIN, seed=3, evidence="full").evidence
    assert hidden.head.soft_cap == 5.0
    logits = hidden.head.scores(hidden.states, slice(0, VOCAB))
    assert logits.abs().max() > 4  # far into the cap
    # Product, quotient, tanh and product are each rounded: up to four neighbors of 5 in bfloat16.
    tolerance = 1e-5 if dtype == "float32" else 4 * 5 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(logits.log_softmax(-1), full.logp, atol=tolerance, rtol=0)


def test_a_head_of_no_known_form_is_refused_before_anything_is_drawn(monkeypatch):
    engine = TransformersEngine(tiny("dense"))
    head = engine.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, logits: logits * 3)
    monkeypatch.setattr(engine.model, "generate", lambda **_: pytest.fail("drawn"))
    with pytest.raises(EngineError, match=r"Qwen3ForCausalLM.*no scale or soft cap.*\"full\""):
        engine.generate(PROMPTS, PLAIN, seed=0, evidence="hidden")


def test_states_of_other_tokens_are_refused(monkeypatch):
    engine = TransformersEngine(tiny("dense"))
    engine.generate(PROMPTS, PLAIN, seed=0, evidence="hidden")
    pack = DrawRecorder.draws

    def late(self, lengths):
        states = [step["evidence"] for step in self.steps]
        for step, state in zip(self.steps, states[1:] + states[:1], strict=True):
            step["evidence"] = state
        return pack(self, lengths)

    monkeypatch.setattr(DrawRecorder, "draws", late)
    with pytest.raises(EngineError, match=r"'transformers' .* miss the log-probs it reported by \d"):
        engine.generate(PROMPTS, PLAIN, seed=0, evidence="hidden")


# -- loading weights ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "1 weights .* model.norm.weight"),
        (lambda w: w.update({"module.x": torch.zeros(1)}), "'module.x' is not one of"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), r"shape \(3,\).* \(64,\)"),
        (lambda w: w.clear(), "weights .* were not given"),
    ],
    ids=["missing", "unknown", "shape", "empty"],
)
def test_weights_that_do_not_fit_are_refused_by_name(change, message):
    model = tiny("dense")
    engine = TransformersEngine(model, version=3)
    weights = dict(model.named_parameters())
    change(weights)
    with pytest.raises(EngineError, match=message):
        engine.load_weights(weights.items(), version=4)
    assert engine.version == 3


def test_a_tied_head_may_be_given_under_both_names():
    model = tiny("dense")
    engine = TransformersEngine(model)
    engine.load_weights(model.state_dict().items(), version=1)
    exact_against(model, engine)


# -- int8 -----------------------------------------------------------------------------------------


def test_the_grid_has_one_scale_per_output_channel():
    # Row 1: scale 2.54/127 = 0.02, so 0.013 -> 1 step, -0.009 -> 0 steps, 0.031 -> 2 steps.
    # Row 2: scale 127/127 = 1, so 0.6 -> 1, -0.4 -> 0, 3.5 -> 4 (half to even). Row 3: zeros.
    weight = torch.tensor([[2.54, 0.013, -0.009, 0.031], [127, 0.6, -0.4, 3.5], [0, 0, 0, 0]])
    expected = torch.tensor([[2.54, 0.02, 0.0, 0.04], [127, 1.0, 0.0, 4.0], [0, 0, 0, 0]])
    torch.testing.assert_close(int8(weight, dim=-1).value, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(int8(weight.T, dim=-2).value, expected.T, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kind", "count"), [("dense", 2 * (4 + 3)), ("moe", 2 * (4 + 2))])
def test_int8_rounds_every_matrix_and_nothing_else(kind, count):
    model = tiny(kind)
    engine = TransformersEngine(model, quantization="int8")
    rounded = matrices(engine.model)
    assert len(rounded) == count  # per layer: q, k, v, o and gate, up, down (experts: two fused)
    original = dict(model.named_parameters())
    for name, weight in engine.model.named_parameters():
        error = (weight - original[name]).abs()
        if name not in rounded:
            assert torch.equal(weight, original[name]), name
            continue
        step = original[name].abs().amax(-1, keepdim=True) / 127
        assert (error <= step * 0.5001).all(), name
        assert (error > 0).float().mean() > 0.9, name
        levels = weight / step
        torch.testing.assert_close(levels, levels.round(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_int8_drifts_by_a_little_and_again_after_every_load(kind):
    model = tiny(kind)
    engine = TransformersEngine(model, quantization="int8")
    ahead = tiny(kind)
    with torch.no_grad():
        for weight in ahead.parameters():
            weight.add_(0.1 * weight.roll(1, 0))
    for trainer in (model, ahead):
        engine.load_weights(trainer.named_parameters(), version=1)
        rollouts = engine.generate(PROMPTS, PLAIN, seed=2, evidence="full")
        logp_mu = rollouts.evidence.logp.double()
        kl = (logp_mu.exp() * (logp_mu - logp_rows(trainer, rollouts, PLAIN))).sum(-1)
        assert len(kl) == 96
        # bf16 gives about 1e-4 here, destroyed weights several nats.
        assert 1e-4 < kl.mean() < 0.05


# -- the head's precision, and a model as a trainer leaves it -----------------------------------------


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_float32_head_on_a_bfloat16_body_takes_new_weights(kind):
    model = tiny(kind)
    plain = TransformersEngine(model, dtype="bfloat16")
    engine = TransformersEngine(model, dtype="bfloat16", head_dtype="float32")
    given = {name: 1.5 * weight.detach() for name, weight in model.named_parameters()}
    for each in (plain, engine):
        each.load_weights(given.items(), version=1)
    hidden = plain.generate(PROMPTS, PLAIN, seed=0, evidence="hidden")
    rows = engine.rescore(hidden).evidence.logp
    weight = given[{"dense": "model.embed_tokens.weight", "moe": "lm_head.weight"}[kind]]
    truth = hidden.evidence.states.float() @ weight.bfloat16().float().T
    assert rows.shape == (96, VOCAB)
    torch.testing.assert_close(rows, truth.log_softmax(-1), atol=1e-4, rtol=0)
    # The test can tell: logits rounded to bfloat16 are further off.
    assert (plain.rescore(hidden).evidence.logp - truth.log_softmax(-1)).abs().max() > 1e-3


def test_a_model_left_in_training_draws_from_another_distribution_than_it_scores(caplog):
    model = tiny("dense")
    engine = TransformersEngine(model, as_in_training=True)
    rollouts = engine.generate(PROMPTS, PLAIN, seed=0, evidence="full")
    gap = (rollouts.evidence.logp - logp_rows(model, rollouts, PLAIN)).abs().amax(-1).view(8, 12)
    assert gap[:, 0].max() < 1e-4
    assert gap[:, 1:].min() > 0.1
    assert not model.training
    assert not caplog.records
    well = TransformersEngine(model, attn_implementation="eager")
    assert well.model.config._attn_implementation == "eager"
    exact_against(model, well)
