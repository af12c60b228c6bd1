"""A checkpoint folder that transformers opens, and how to get one from the shards that trainers write."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from offdrift.errors import RecordError

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of which transformers needs one, beside `config.json`."""

CONVERTERS = (
    ("adapter_config.json", "a LoRA adapter; merge it into its base model: merge_and_unload of peft, save_pretrained"),
    (
        "model_world_size_*_rank_*.pt",
        "FSDP shards of verl; join them: python -m verl.model_merger merge --backend fsdp "
        "--local_dir {folder} --target_dir MERGED",
    ),
    (
        "dist_ckpt",
        "Megatron shards of verl; join them: python -m verl.model_merger merge --backend megatron "
        "--local_dir {folder} --target_dir MERGED",
    ),
    (
        "zero_to_fp32.py",
        "DeepSpeed shards; join them: python {folder}/zero_to_fp32.py --safe_serialization {folder} MERGED, "
        "and copy config and tokenizer beside them",
    ),
    (
        "latest_checkpointed_iteration.txt",
        "Megatron checkpoints; convert one, in slime: python tools/convert_torch_dist_to_hf.py --input-dir "
        "{folder}/iter_XXXXXXX --output-dir MERGED --origin-hf-dir BASE; in NeMo-RL: "
        "examples/converters/convert_megatron_to_hf.py",
    ),
    (
        "common.pt",
        "a Megatron checkpoint; convert it, in slime: python tools/convert_torch_dist_to_hf.py --input-dir "
        "{folder} --output-dir MERGED --origin-hf-dir BASE; in NeMo-RL: examples/converters/convert_megatron_to_hf.py",
    ),
    (
        "*.distcp",
        "PyTorch distributed shards; convert them, in NeMo-RL: examples/converters/convert_dcp_to_hf.py --config "
        "CONFIG --dcp-ckpt-path {folder} --hf-ckpt-path MERGED; elsewhere by the framework's own exporter",
    ),
)
"""Files by which shards are known, and the words that say how they become a checkpoint."""

STEP = re.compile(r"(?:step|steps|iter|iteration|checkpoint|version|v)[_\-=]?0*(\d+)(?!.*\d)", re.IGNORECASE)
LISTED = 10_000
"""Entries of a folder that are looked at."""


def checkpoint_folder(path: Path) -> Path:
    """The folder, if it holds a configuration and whole weights.

    Raises: `RecordError` that says what is missing; of shards, the converter; where a folder inside is one, its name.
    """
    folder = path.expanduser()
    if not folder.is_dir():
        raise RecordError(f"{path} is not a folder; give the folder that the trainer saved at that step")
    if _whole(folder):
        return folder
    inside = next((f for f in _folders(folder) if _whole(f)), None)
    if inside is not None:
        raise RecordError(f"{path} holds no model itself, but {inside} does; give that folder")
    for holder in (folder, *_folders(folder)):
        for pattern, words in CONVERTERS:
            if next(holder.glob(pattern), None) is not None:
                raise RecordError(f"{holder} holds {words.format(folder=holder)}; then give MERGED")
    lacks = "weights (model.safetensors)" if (folder / "config.json").is_file() else "config.json"
    raise RecordError(f"{path} has no {lacks}; give a folder as save_pretrained writes it: config, weights, tokenizer")


def step_of(path: Path) -> int | None:
    """The step that a folder's name, or its nearest parent's that has one, tells; None if none does.

    Example:
        >>> step_of(Path("runs/global_step_40/actor/huggingface")), step_of(Path("out/checkpoint-7"))
        (40, 7)
    """
    for name in reversed(path.parts):
        if step := STEP.search(name):
            return int(step[1])
    return None


def _whole(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in WEIGHTS)


def _folders(folder: Path) -> Iterable[Path]:
    """Folders inside, two levels deep."""
    first = [f for f in islice(folder.iterdir(), LISTED) if f.is_dir()]
    yield from sorted(first)
    for inner in sorted(first):
        yield from sorted(f for f in islice(inner.iterdir(), LISTED) if f.is_dir())
