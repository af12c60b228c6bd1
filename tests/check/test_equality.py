"""Whether engines give the same bits again, and which module is the first that differs."""

import json

import pytest
import torch

from offdrift.check import equality
from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.check import check
from offdrift.check.equality import bisect, determinism
from offdrift.check.factors import chosen
from offdrift.check.page import render_check
from offdrift.check.view import bisected, check_view
from offdrift.engines.hf import TransformersEngine
from offdrift.errors import NotOfferedError
from offdrift.models import tiny_tokenizer
from offdrift.records.provenance import Sampling
from tests.check.benches import BFLOAT16, FLOAT32, bench_of
from tests.engines.models import need_vllm, tiny
from tests.show.screens import printed

INVARIANT = EngineSpec.parse("transformers:float32,batch_invariant=true")
HALF = EngineSpec.parse("transformers:float16,batch_invariant=true")


@pytest.mark.parametrize(("spec", "kind"), [(INVARIANT, "moe"), (HALF, "dense")])
def test_a_batch_invariant_pair_has_a_kl_of_exactly_0_and_says_which_setting(spec, kind):
    with bench_of(kind, count=10) as bench:
        result = check(bench, spec, spec, layers=True, factors=chosen("train_batch,tensor_parallel,batch"))
    json.dumps(result, allow_nan=False)
    assert result["baseline"]["kl_max"] == result["baseline"]["abs_log_ratio_max"] == 0
    assert result["noise"]["null"]["kl_max"] == 0
    rows = {row["factor"]: row for row in result["factors"]}
    assert rows["train_batch"]["kl_max"] == rows["batch"]["kl_max"] == rows["batch"]["detail"]["self_kl_max"] == 0
    split = rows["tensor_parallel"]["detail"]
    assert split["abs_logit_difference_max"][0] == max(split["abs_logit_difference_max_in_tree"]) == 0
    assert min(split["abs_logit_difference_max"][1:]) > 0
    assert result["recommended"]["method"] is None
    assert "same bits" in render_check(result)
    for side in ("rollout", "train"):
        assert result["deterministic"][side]["deterministic"] is True
        assert result["deterministic"][side]["setting"] == "batch_invariant=true"
    assert result["bisect"]["first"] is None
    assert len(result["bisect"]["modules"]) > 20
    assert result["verdict"]["level"] == "ok"
    shown = printed(check_view(result))
    assert "yes, batch_invariant=true" in shown
    assert "same bits in both engines" in shown


def test_an_engine_whose_batches_matter_is_not_deterministic_and_is_told_how():
    with bench_of() as bench:
        row = determinism(bench, FLOAT32, FLOAT32)["rollout"]
    assert row["deterministic"] is False
    assert row["repeat"]["abs_log_ratio_max"] == 0
    assert 0 < row["batch"]["abs_log_ratio_max"] < 1e-4
    assert row["setting"] == "transformers:float32,batch_invariant=true"


def test_an_engine_that_does_not_repeat_itself_is_named(monkeypatch):
    draw, calls = TransformersEngine.generate, []

    def generate(self, prompts, sampling, *, seed, evidence="sampled"):
        calls.append(len(prompts))
        return draw(self, prompts, sampling, seed=seed + len(calls), evidence=evidence)

    monkeypatch.setattr(TransformersEngine, "generate", generate)
    with bench_of() as bench:
        row = determinism(bench, INVARIANT, INVARIANT)["rollout"]
    assert row["deterministic"] is False
    assert row["repeat"]["same_tokens_frac"] < 1
    assert "the same batch again" in row["text"]
    assert calls[1:] == [12, 1, 2, equality.ALONE]


def test_a_server_is_told_the_name_of_its_own_mode():
    class Served:
        software = "sglang"

    class Server:
        served = Served()

    compared = {"repeat": {"abs_log_ratio_max": 0.5}, "batch": {}}
    spec = EngineSpec.parse("openai:http://127.0.0.1:1/v1")
    assert "--enable-deterministic-inference" in equality._concluded(spec, compared, [4], Server())["text"]
    assert "VLLM_BATCH_INVARIANT=1" in equality._concluded(EngineSpec("vllm", "bfloat16"), compared, [4])["text"]


def scale(layer) -> None:
    layer.mlp.down_proj.weight.mul_(1 + 1e-5)


def sharpen(layer) -> None:
    layer.self_attn.scaling *= 1 + 1e-4


def loosen(layer) -> None:
    layer.post_attention_layernorm.variance_epsilon *= 10


@pytest.mark.parametrize(
    ("plant", "module", "within"),
    [
        (scale, "model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"),
        (sharpen, "model.layers.1.self_attn.o_proj", "model.layers.1.self_attn"),
        (loosen, "model.layers.1.post_attention_layernorm", "model.layers.1.post_attention_layernorm"),
    ],
)
def test_a_planted_difference_is_found_in_its_module(plant, module, within):
    with bench_of() as bench:
        bench.rollouts(INVARIANT)
        trainer = bench.train_model(INVARIANT)
        with torch.no_grad():
            plant(trainer.model.layers[1])
        result = bisect(bench, INVARIANT, INVARIANT)
    assert result["first"]["module"] == module
    assert result["first"]["within"] == within
    before = [m["module"] for m in result["modules"]]
    assert all(m["abs_max"] == 0 for m in result["modules"][: before.index(module)])
    assert before.index(module) > 15
    assert result["modules"][-1]["abs_max"] > 0
    assert within in bisected({"bisect": result})


def test_the_rounding_of_weights_begins_at_the_embedding():
    with bench_of() as bench:
        result = bisect(bench, BFLOAT16, FLOAT32)
        expected = bench.model.model.embed_tokens.weight.detach()
        rounded = expected.bfloat16().float()
    assert result["first"]["module"] == "model.embed_tokens"
    assert 0 < result["first"]["abs_max"] <= float((expected - rounded).abs().max())


def test_a_server_does_not_show_its_layers(monkeypatch):
    with bench_of() as bench:
        monkeypatch.setattr(bench, "engine", lambda spec: object())
        with pytest.raises(NotOfferedError, match="server does not show its layers"):
            bisect(bench, EngineSpec.parse("openai:http://127.0.0.1:1/v1"), FLOAT32)


@pytest.mark.slow
def test_vllm_is_bisected_by_the_modules_that_both_have():
    need_vllm()
    with bench_of() as bench:
        exact = bisect(bench, EngineSpec.parse("vllm:float32,max_model_len=64"), FLOAT32)
        row = determinism(bench, EngineSpec.parse("vllm:float32,max_model_len=64"), FLOAT32)["rollout"]
    names = {m["module"] for m in exact["modules"]}
    assert {"model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"} <= names
    assert {"model.layers.0.self_attn.k_proj", "model.layers.0.mlp.up_proj"} <= names, "vLLM merges these"
    assert max(m["relative"] for m in exact["modules"]) < 1e-5
    assert row["repeat"]["abs_log_ratio_max"] == 0


class Apart(torch.nn.Module):
    """Projections as a trainer has them, beside one that a rollout engine merged."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(4, n, bias=False) for n in (6, 2, 3))
        for parameter in self.parameters():  # whole numbers: their sums are the same in any order
            parameter.data = torch.randint(-8, 9, parameter.shape).float()

    def forward(self, input_ids):
        x = torch.arange(4.0 * len(input_ids)).view(-1, 4)
        return [m(x) for m in (self.q_proj, self.k_proj, self.v_proj)]


class Joined(torch.nn.Module):
    def __init__(self, apart: Apart, rows: int) -> None:
        super().__init__()
        weight = torch.cat([m.weight for m in (apart.q_proj, apart.k_proj, apart.v_proj)])
        self.qkv_proj = torch.nn.Linear(4, rows, bias=False)
        self.qkv_proj.weight.data = torch.nn.functional.pad(weight, (0, 0, 0, rows - len(weight)))

    def forward(self, input_ids):
        return self.qkv_proj(torch.arange(4.0 * len(input_ids)).view(-1, 4))


@pytest.mark.parametrize(("rows", "found"), [(11, {"q_proj", "k_proj", "v_proj"}), (12, set())])
def test_a_merged_projection_is_compared_part_by_part(rows, found):
    """Unless its width is another, where a split would compare a padding with a weight."""
    apart = Apart()
    joined = Joined(apart, rows)
    with torch.no_grad(), equality.outputs_of(apart) as ours, equality.outputs_of(joined) as theirs:
        apart(input_ids=torch.tensor([1, 2, 3]))
        joined(input_ids=torch.tensor([1, 2, 3]))
    equality.split_merged(theirs, ours)
    assert theirs.parts.keys() & ours.parts.keys() == found
    for name in found:
        assert torch.equal(theirs.last(name, 3), ours.last(name, 3))
        assert torch.equal(theirs.last(name, 3, inputs=True), ours.last(name, 3, inputs=True))


class Flat(torch.nn.Module):
    """A model as vLLM has it: tokens of all requests in one dimension, heads in another, norms that give a pair."""

    class FlatDecoderLayer(torch.nn.Module):
        def forward(self, x):
            return x, 2 * x

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.layer = torch.nn.Embedding(9, 8), torch.nn.LayerNorm(2), self.FlatDecoderLayer()

    def forward(self, input_ids):
        x = self.embed(input_ids)
        self.norm(x.view(len(x), 4, 2))
        return self.layer(x)[0]


def test_modules_of_flat_batches_are_read_token_by_token():
    model = Flat()
    with torch.no_grad(), equality.outputs_of(model) as noted:
        for ids in ([1, 2, 3], [4], [5]):  # a prompt, then one token after the other
            model(input_ids=torch.tensor(ids))
        whole = model.embed(torch.tensor([1, 2, 3, 4, 5]))
    assert torch.equal(noted.last("embed", 5), whole.double())
    assert noted.last("norm", 3).shape == (3, 8)
    assert torch.equal(noted.last("layer", 2), (whole + 2 * whole)[-2:].double())
    assert noted.last("layer", 6) is None


@pytest.mark.parametrize(
    ("dtypes", "limit"),
    [
        (("float32", "float32"), 1.1920929e-5),
        (("float16", "float32"), 0.09765625),
        (("bfloat16", "float32"), None),
        (("auto", "float32"), None),
    ],
)
def test_what_rounding_may_do_to_a_module_is_a_hundred_eps_or_unknown(dtypes, limit):
    assert equality.rounding_limit(*dtypes) == (None if limit is None else pytest.approx(limit))


class ScaledValues(Bench):
    """A rollout engine whose second layer has values that are larger by 0.1 %."""

    def engine(self, spec):
        fresh = spec.kind not in self._engines
        made = super().engine(spec)
        if fresh:
            with torch.no_grad():
                made.model.model.layers[1].self_attn.v_proj.weight.mul_(1.001)
        return made


def test_a_wrong_operand_is_told_from_rounding():
    with bench_of(count=4) as bench:
        honest = bisect(bench, FLOAT32, FLOAT32)
    with bench_of(count=4, made=ScaledValues) as bench:
        wrong = bisect(bench, FLOAT32, FLOAT32)
        half = bisect(bench, BFLOAT16, FLOAT32)
    assert honest["first"] is not None
    assert honest["beyond_rounding"] is None
    assert wrong["beyond_rounding"]["module"] == "model.layers.1.self_attn.v_proj"
    assert wrong["beyond_rounding"]["relative"] == pytest.approx(0.001, rel=0.05)
    assert half["rounding_limit"] is half["beyond_rounding"] is None


class AnotherPrompt(Bench):
    """A server that puts its own token before every prompt."""

    def rollouts(self, spec, *, prompts=None, **how):
        asked = self.prompts if prompts is None else prompts
        drawn = super().rollouts(spec, prompts=[[9, *p] for p in asked], **how)
        kept = torch.ones(len(drawn.prompt_tokens), dtype=torch.bool)
        kept[drawn.prompt_cu_seqlens[:-1].long()] = False
        cuts = drawn.prompt_cu_seqlens - torch.arange(len(drawn.prompt_cu_seqlens))
        return drawn.with_(prompt_tokens=drawn.prompt_tokens[kept], prompt_cu_seqlens=cuts)


def test_a_difference_that_is_not_in_the_modules_is_sought_elsewhere():
    with bench_of(count=6, made=AnotherPrompt) as bench:
        found = check(bench, FLOAT32, FLOAT32, noise=False, layers=True)
    assert found["passed"] is False
    assert found["bisect"]["elsewhere"] is True
    assert "generation_config.json" in bisected(found)
    with bench_of(count=6, made=ScaledValues) as bench:
        assert check(bench, FLOAT32, FLOAT32, noise=False, layers=True)["bisect"]["elsewhere"] is False
    with bench_of(count=6) as bench:
        assert check(bench, FLOAT32, FLOAT32, noise=False, layers=True)["bisect"]["elsewhere"] is False


class LogitsProcessor(torch.nn.Module):
    """vLLM's, by its name and settings."""

    def __init__(self, scale: float = 1.0, soft_cap: float | None = None) -> None:
        super().__init__()
        self.scale, self.soft_cap = scale, soft_cap


@pytest.mark.parametrize(
    ("module", "head"),
    [
        (LogitsProcessor(), True),
        (LogitsProcessor(scale=0.5), False),
        (LogitsProcessor(soft_cap=30.0), False),
        (torch.nn.Linear(2, 2), False),
    ],
    ids=["plain", "scaled", "capped", "another"],
)
def test_a_logits_processor_that_only_multiplies_is_the_head(module, head):
    assert equality.is_head(module) is head


def test_a_row_of_a_tied_embedding_that_no_token_reads_is_named_as_the_tied_tensor():
    with bench_of(count=6) as bench:
        drawn = bench.rollouts(FLOAT32)
        read = {*drawn.tokens.tolist(), *drawn.prompt_tokens.tolist()}
        unread = next(i for i in range(63, 3, -1) if i not in read)
        with torch.no_grad():
            bench.engine(FLOAT32).model.model.embed_tokens.weight[unread] *= 1.5
        beyond = bisect(bench, FLOAT32, FLOAT32)["beyond_rounding"]
    assert (beyond["module"], beyond["tied_to"]) == ("lm_head", "model.embed_tokens")


def test_a_difference_at_the_prompt_alone_is_in_the_module_that_reads_it():
    """The row of a token that stands in the prompt before the places from which response tokens are predicted."""
    prompt = list(range(4, 34))
    with Bench(tiny("dense"), tiny_tokenizer(), [prompt, [5]], sampling=Sampling(max_tokens=12)) as bench:
        drawn = bench.rollouts(FLOAT32)
        longest = int(drawn.lengths.argmax())
        assert longest == 0
        response = drawn.tokens[: int(drawn.lengths[0])].tolist()
        only = next(token for token in prompt[:-1] if token not in response)
        with torch.no_grad():
            bench.engine(FLOAT32).model.model.embed_tokens.weight[only] *= 1.5
        beyond = bisect(bench, FLOAT32, FLOAT32)["beyond_rounding"]
    assert beyond["module"] == "model.embed_tokens"
