"""A live check of servers whose weights are known: real engines draw and read, in float32 and bfloat16."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from offdrift.check.live import Heard, LiveCheck, Measurements, named_alone, server_spec
from offdrift.check.live_result import concluded, live_result
from offdrift.check.page import render_check
from offdrift.check.view import check_view
from offdrift.engines import make_engine
from offdrift.errors import BadValueError, EngineError
from offdrift.models import load_model, save_for_engine, tiny_tokenizer
from offdrift.records.provenance import Sampling
from tests.check.benches import prompts_of
from tests.engines.models import tiny
from tests.show.screens import printed

PLAIN = Sampling(16)
STEPS = (0, 1, 2)
UPDATE = 0.02
"""Size of an update, as a share of each tensor's."""


@torch.no_grad()
def updated(model: nn.Module, seed: int, size: float = UPDATE) -> nn.Module:
    """A copy of the model after an update of this size in a random direction."""
    generator, model = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    for weight in model.parameters():
        weight.add_(size * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=generator))
    return model


def saved(model: nn.Module, folder: Path) -> Path:
    save_for_engine(model, tiny_tokenizer(), folder)
    return folder


def history(kind: str, root: Path, size: float = UPDATE) -> dict[int, nn.Module]:
    """Checkpoints of three steps, in folders step_0 to step_2."""
    models = {0: tiny(kind)}
    for step in STEPS[1:]:
        models[step] = updated(models[step - 1], step, size)
    for step, model in models.items():
        saved(model, root / f"step_{step}")
    return models


def heard_from(model: nn.Module, dtype: str = "float32", count: int = 24) -> Heard:
    """What a server with these weights says."""
    with_prompts = prompts_of(count)
    engine = make_engine("transformers", model, dtype=dtype)
    drawn = engine.generate(with_prompts, PLAIN, seed=3)
    greedy = engine.generate(with_prompts, Sampling(16, top_k=1), seed=3)
    read = engine.rescore(greedy, evidence="sampled", sampling=PLAIN)
    engine.close()
    return Heard(drawn, greedy, read, "", None)


def compared(root: Path, heard: Heard, *, to: int = 2, earlier=(), dtype: str | None = "float32") -> Measurements:
    folders = [root / f"step_{step}" for step in earlier]
    live = LiveCheck(server_spec("openai:http://127.0.0.1:1"), root / f"step_{to}", earlier=folders, prompts=["1+1="])
    return live.compared(load_model(str(live.folders[0]), seed=0)[0], heard, dtype)


NEITHER = "nor an earlier one"
TIED_HEAD = "the output head, tied to"
READS_ALIKE = "reads tokens as the checkpoint does"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    return root, history("dense", root)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    root = tmp_path_factory.mktemp("moe")
    return root, history("moe", root)


# -- whole checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("holds", STEPS)
def test_the_checkpoint_that_the_server_holds_is_named(dense, holds, dtype):
    root, models = dense
    heard = heard_from(models[holds], dtype)
    found = compared(root, heard, earlier=(1, 0), dtype=dtype)
    result = concluded(found, heard)
    assert result.state == ("held" if holds == 2 else "not held")
    if holds < 2:
        assert f"holds {root}/step_{holds}, {2 - holds} step" in result.text
        assert "behind" in result.text
        place = next(c for c in found.earlier if c.step == holds).position
        assert place.place == pytest.approx(1, abs=3 * place.error + 1e-4)


def test_without_earlier_folders_a_stale_server_is_not_held_and_they_are_asked_for(dense):
    root, models = dense
    heard = heard_from(models[1])
    result = concluded(compared(root, heard), heard)
    assert result.state == "not held"
    assert any("--earlier" in step for step in result.steps)


def test_a_checkpoint_that_is_not_among_them_is_not_called_held(dense):
    root, models = dense
    heard = heard_from(models[0])
    result = concluded(compared(root, heard, earlier=(1,)), heard)
    assert result.state == "not held"
    assert NEITHER in result.text


def test_a_server_that_is_ahead_is_told(dense):
    root, models = dense
    heard = heard_from(models[2])
    result = concluded(compared(root, heard, to=1, earlier=(0,)), heard)
    assert result.state == "not held"
    assert "later step" in result.steps[0]


def test_updates_below_the_rounding_of_bfloat16_are_told_apart_by_the_position(tmp_path):
    models = history("dense", tmp_path, size=0.003)
    heard = heard_from(models[1], "bfloat16", count=56)
    found = compared(tmp_path, heard, earlier=(1,), dtype="bfloat16")
    assert found.checkpoint.fits  # precision alone does not see it
    assert found.earlier[0].position.above(0.5, z=3.0)
    result = concluded(found, heard)
    assert result.state == "not held"
    assert "1 step behind" in result.text
    heard = heard_from(models[2], "bfloat16", count=56)
    assert concluded(compared(tmp_path, heard, earlier=(1,), dtype="bfloat16"), heard).state == "held"


def test_checkpoints_that_cannot_be_told_apart_are_not_decided(tmp_path):
    models = history("dense", tmp_path, size=3e-5)
    heard = heard_from(models[1], "bfloat16", count=8)
    found = compared(tmp_path, heard, earlier=(1,), dtype="bfloat16")
    result = concluded(found, heard)
    assert result.state in ("cannot tell", "held") if found.earlier[0].same else result.state == "cannot tell"
    assert any("--max-tokens" in step for step in result.steps)


def test_an_earlier_folder_with_the_same_weights_decides_nothing(dense):
    root, models = dense
    heard = heard_from(models[2])
    found = compared(root, heard, earlier=(2,))
    assert found.earlier[0].same
    assert found.others == []
    assert concluded(found, heard).state == "held"


def test_of_a_server_of_unknown_precision_only_earlier_folders_tell(dense):
    root, models = dense
    heard = heard_from(models[1], "bfloat16")
    assert concluded(compared(root, heard, dtype=None), heard).state == "cannot tell"
    stale = concluded(compared(root, heard, earlier=(1, 0), dtype=None), heard)
    assert stale.state == "not held"
    assert "step_1" in stale.text


# -- parts -------------------------------------------------------------------------------------------


def mixed(new: nn.Module, old: nn.Module, *words: str, only: bool = False) -> nn.Module:
    """The new model with the old weights of the tensors whose names hold a word; or the other way round."""
    model, source = (copy.deepcopy(old), new) if only else (copy.deepcopy(new), old)
    with torch.no_grad():
        for (name, weight), other in zip(model.named_parameters(), source.parameters(), strict=True):
            if any(word in name for word in words):
                weight.copy_(other)
    return model


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("layers.1.",), "model.layers.1"),
        (("embed_tokens",), "model.embed_tokens.weight"),
        (("mlp.down_proj",), "model.layers.*.mlp.down_proj.weight"),
        (("layers.0.self_attn.q_proj",), "model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_a_part_that_stayed_behind_is_named(dense, words, named):
    root, models = dense
    heard = heard_from(mixed(models[2], models[1], *words))
    found = compared(root, heard, earlier=(1, 0))
    assert found.part is not None
    assert found.part.name == named
    assert found.part.left < 1e-3 * found.part.before
    result = concluded(found, heard)
    assert result.state == "not held"
    assert f"{named} stayed behind" in result.text
    assert "1 step behind" in result.text


def test_the_only_part_that_arrived_is_named(dense):
    root, models = dense
    heard = heard_from(mixed(models[2], models[1], "layers.0.", only=True))
    found = compared(root, heard, earlier=(1,))
    assert found.part is not None
    assert found.part.name == "model.layers.0"
    assert "Only model.layers.0 arrived" in concluded(found, heard).text


def test_a_head_that_stayed_behind_its_tied_embedding_is_named(dense):
    root, models = dense
    model = copy.deepcopy(models[2])
    model.lm_head.weight = nn.Parameter(models[1].lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    found = compared(root, heard_from(model), earlier=(1,))
    assert found.part is not None
    assert found.part.name.startswith(TIED_HEAD)


def test_in_bfloat16_a_layer_that_stayed_behind_is_named(dense):
    root, models = dense
    heard = heard_from(mixed(models[2], models[1], "layers.1."), "bfloat16", count=48)
    found = compared(root, heard, earlier=(1,), dtype="bfloat16")
    assert found.part is not None
    assert "layers.1" in found.part.name
    assert concluded(found, heard).state == "not held"


def test_an_expert_that_stayed_behind_is_named(sparse):
    root, models = sparse
    model = copy.deepcopy(models[2])
    with torch.no_grad():
        for (name, weight), old in zip(model.named_parameters(), models[1].parameters(), strict=True):
            if "experts" in name and "layers.1" in name:
                weight[3].copy_(old[3])
    found = compared(root, heard_from(model), earlier=(1,))
    assert found.part is not None
    assert "experts" in found.part.name
    assert "[3]" in found.part.name


def test_the_weights_of_the_caller_are_left_as_they_were(dense):
    root, models = dense
    live = LiveCheck(
        server_spec("openai:http://127.0.0.1:1"), root / "step_2", earlier=[root / "step_1"], prompts=["1"]
    )
    model = load_model(str(root / "step_2"), seed=0)[0]
    before = [w.detach().clone() for w in model.parameters()]
    live.compared(model, heard_from(mixed(models[2], models[1], "layers.1.")), "float32")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# -- drawing and reading -----------------------------------------------------------------------------


def test_a_cache_of_old_keys_is_told_from_old_weights(dense):
    root, models = dense
    stale, fresh = heard_from(models[1]), heard_from(models[2])
    heard = Heard(stale.drawn, fresh.greedy, fresh.read, "", None)
    result = concluded(compared(root, heard), heard)
    assert result.state == "not held"
    assert READS_ALIKE in result.text
    assert "prefix" in result.steps[0]


def test_a_server_that_reads_nothing_is_compared_by_what_it_drew(dense):
    root, models = dense
    heard = heard_from(models[2])
    heard = Heard(heard.drawn, heard.greedy, None, "it gives no log-probs of prompts", None)
    found = compared(root, heard, earlier=(1,))
    assert concluded(found, heard).state == "held"
    assert found.greedy == 1.0


# -- what is written and shown -----------------------------------------------------------------------


@pytest.fixture
def result(dense):
    root, models = dense
    heard = heard_from(mixed(models[2], models[1], "layers.1."))
    live = LiveCheck(
        server_spec("openai:http://127.0.0.1:1"), root / "step_2", earlier=[root / "step_1"], prompts=["1"]
    )
    model = load_model(str(root / "step_2"), seed=0)[0]
    return live_result(live, heard, live.compared(model, heard, "float32"))


def test_the_result_is_json_with_a_state_and_every_folder(result):
    kept = json.loads(json.dumps(result, allow_nan=False))
    assert kept["passed"] is False
    assert kept["live"]["state"] == "not held"
    assert kept["live"]["part"]["name"] == "model.layers.1"
    assert [Path(c["folder"]).name for c in kept["live"]["earlier"]] == ["step_1"]
    assert kept["findings"][0]["rule"] == "server_holds_other_weights"


def test_the_screen_and_the_page_show_the_part_and_the_positions(result):
    screen, page = printed(check_view(result, width=100), width=100), render_check(result)
    for shown in (screen, page):
        assert "model.layers.1" in shown
        assert "position 0." in shown
    assert "mean KL" not in screen
    hostile = {**result, "live": {**result["live"], "weight_label": "<script>x</script>"}}
    assert "<script>x" not in render_check(hostile)


# -- what cannot be asked ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["transformers:float32", "vllm:bfloat16", "openai:", "", "http://127.0.0.1:8000"])
def test_only_running_servers_are_compared_with_a_folder(text):
    with pytest.raises(EngineError, match="openai:URL"):
        server_spec(text)


def test_options_of_two_engines_are_refused_beside_a_checkpoint():
    with pytest.raises(
        BadValueError, match=r"^--checkpoint compares a running server.* two engines takes --max-kl: leave"
    ):
        named_alone(Path("x"), ["--max-kl"])
    with pytest.raises(BadValueError, match="--checkpoint FOLDER"):
        named_alone(None, [])


def test_a_server_that_is_not_there_is_one_error(dense):
    root, _ = dense
    live = LiveCheck(server_spec("openai:http://127.0.0.1:9"), root / "step_2", prompts=["1+1="])
    with pytest.raises(EngineError, match="is the server running at this address"):
        live.run()
