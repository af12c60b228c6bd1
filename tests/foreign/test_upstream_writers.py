"""What frameworks write to disk, by their own writers from their sources: `make test-upstream`.

Three sequences of `tests.records.samples` go through the function that a run calls, and are read back. As in
test_upstream.py, what a writer imports and does not write with is hollow.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.foreign import real
from tests.foreign.test_upstream import empty, hollow, leave, packages, source
from tests.records.samples import (
    ADVANTAGES,
    MASK,
    PROMPTS,
    RESPONSES,
    REWARDS,
    STEP,
    TEXTS,
    places,
    read_all,
    rollout_logp,
    trainer_logp,
)

pytestmark = pytest.mark.foreign

RANGE = range(len(PROMPTS))
LENGTHS = [len(response) for response in RESPONSES]


def columns(value: Any) -> list[torch.Tensor]:
    """A number of each token of each response."""
    return [torch.tensor([value(s, t) for t in range(n)]) for s, n in enumerate(LENGTHS)]


def check_read(folder: Path, format: str, *, trainer: bool = True) -> None:
    """Every token that trains comes back with its log-probs, and nothing is bad."""
    found, batches, bad = read_all(folder)
    assert (found.format, bad) == (format, [])
    wanted = places()
    assert len(wanted) == 7

    def read(name: str) -> list[float]:
        return [float(x) for batch in batches for x in getattr(batch, name)]

    assert read("logp_rollout") == [rollout_logp(s, t) for s, t in wanted]
    if trainer:
        assert read("logp_old") == [trainer_logp(s, t) for s, t in wanted]
    assert read("tokens") == [RESPONSES[s][t] for s, t in wanted]
    assert [int(x) for batch in batches for x in batch.step] == [STEP] * len(PROMPTS)
    assert read("rewards") == REWARDS


def train_fields() -> dict[str, Any]:
    """`rollout_data` of slime, miles and vime, as their trainers hold it after the forward pass."""
    return {
        "tokens": [torch.tensor(p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)],
        "total_lengths": [len(p) + n for p, n in zip(PROMPTS, LENGTHS, strict=True)],
        "response_lengths": LENGTHS,
        "loss_masks": [torch.tensor(mask) for mask in MASK],
        "log_probs": columns(trainer_logp),
        "rollout_log_probs": columns(rollout_logp),
        "advantages": columns(lambda s, t: ADVANTAGES[s]),
        "sample_indices": list(RANGE),
        "partition": list(RANGE),
        "raw_reward": REWARDS,
    }


@pytest.fixture(params=["slime", "vime"])
def dumper(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """`observability.train_data_utils` of slime and of vime, in the only process of a group."""
    name = request.param
    root = source(name)
    packages(monkeypatch, root, name, f"{name}.observability", *([f"{name}.data"] if name == "vime" else []))
    alone = {
        "is_pipeline_last_stage": lambda **_: True,
        **{
            f"get_{what}_rank": lambda **_: 0 for what in ("tensor_model_parallel", "context_parallel", "data_parallel")
        },
        **{f"get_{what}_world_size": lambda **_: 1 for what in ("context_parallel", "data_parallel")},
        "get_data_parallel_src_rank": lambda **_: 0,
    }
    empty(monkeypatch, "megatron")
    empty(monkeypatch, "megatron.core", mpu=SimpleNamespace(**alone))
    hollow(monkeypatch, f"{name}.backends", f"{name}.backends.megatron_utils")
    gathered = {"all_gather_with_cp": lambda x, total, own: x, "get_logits_and_tokens_offset_with_cp": None}
    empty(monkeypatch, f"{name}.backends.megatron_utils.cp_utils", **gathered)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    yield name, importlib.import_module(f"{name}.observability.train_data_utils")
    leave(name)


def test_train_dumps_of_slime_and_vime(dumper: tuple[str, Any], tmp_path: Path) -> None:
    """vime's with the candidates of its sampler, which are not read."""
    name, module = dumper
    data = train_fields()
    if name == "vime":
        data["rollout_topk_token_ids"] = [torch.zeros(n, 4, dtype=torch.int32) for n in LENGTHS]
        data["rollout_topk_log_probs"] = [torch.full((n, 4), -1.0) for n in LENGTHS]
    args = SimpleNamespace(save_debug_train_data=str(tmp_path / "train" / "{rollout_id}.pt"))
    module.save_debug_train_data(args, rollout_id=STEP, rollout_data=data)
    check_read(tmp_path, "slime-train")


def test_train_dumps_of_miles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages(monkeypatch, source("miles"), "miles", "miles.utils")
    parallel = SimpleNamespace(cp=SimpleNamespace(rank=0, size=1))
    hollow(monkeypatch, "miles.backends", "miles.backends.training_utils")
    empty(monkeypatch, "miles.backends.training_utils.parallel", get_parallel_state=lambda: parallel)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    module = importlib.import_module("miles.utils.train_dump_utils")
    path = str(tmp_path / "train_data" / "{rollout_id}_{rank}.pt")
    args = SimpleNamespace(save_debug_train_data=path, qkv_format="thd")
    module.save_debug_train_data(args, rollout_id=STEP, rollout_data=train_fields())
    check_read(tmp_path, "miles-train")
    leave("miles")


def samples_of(types: Any) -> list[Any]:
    """The framework's own samples, after its rollout."""
    made = []
    for s in RANGE:
        sample = types.Sample(index=s, group_index=min(s, 1), prompt="p", tokens=PROMPTS[s] + RESPONSES[s])
        sample.response, sample.response_length = TEXTS[s], LENGTHS[s]
        sample.reward, sample.loss_mask = REWARDS[s], MASK[s]
        sample.rollout_log_probs = [rollout_logp(s, t) for t in range(LENGTHS[s])]
        sample.status = types.Sample.Status.COMPLETED
        sample.metadata = {"place": Path("/tmp"), "messages": None}
        made.append(sample)
    return made


@pytest.mark.parametrize("name", ["slime", "vime"])
def test_rollout_dumps_of_slime_and_vime(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vime's with tensors that lie in files of their own, which are not read."""
    root = source(name)
    packages(monkeypatch, root, name, *(f"{name}.{part}" for part in ("observability", "utils", "data")))
    hollow(monkeypatch, f"{name}.utils.misc", f"{name}.utils.routed_experts")
    types = importlib.import_module(f"{name}.utils.types")
    module = importlib.import_module(f"{name}.observability.rollout_data_utils")
    samples = samples_of(types)
    if name == "vime":
        tensor = importlib.import_module("vime.data.tensor")
        for i, sample in enumerate(samples):
            sample.rollout_topk_log_probs = torch.full((LENGTHS[i], 4), -1.0)
            kept = torch.zeros(LENGTHS[i], 4, dtype=torch.int32)
            sample.rollout_topk_token_ids = tensor.DiskTensorRef.write(kept, tmp_path / "spill" / f"{i}.safetensors")
    path = str(tmp_path / "rollout" / "{rollout_id}.pt")
    module.save_debug_rollout_data(path, samples, rollout_id=STEP, evaluation=False)
    check_read(tmp_path, "slime-rollout", trainer=False)
    leave(name)


def test_rollout_traces_of_open_instruct(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages(monkeypatch, source("open-instruct"), "open_instruct")
    hollow(monkeypatch, *(f"open_instruct.{part}" for part in ("data_types", "model_utils", "utils")))
    empty(monkeypatch, "open_instruct.logger_utils", setup_logger=lambda name: SimpleNamespace(info=lambda text: None))
    module = importlib.import_module("open_instruct.rl_utils")
    count = len(PROMPTS)
    batch = SimpleNamespace(queries=PROMPTS, scores=REWARDS, datasets=["sums"] * count, ground_truths=[None] * count)
    logprobs = [[rollout_logp(s, t) for t in range(n)] for s, n in enumerate(LENGTHS)]
    result = SimpleNamespace(responses=RESPONSES, finish_reasons=["stop"] * count, request_info=None, logprobs=logprobs)
    module._save_rollouts(str(tmp_path), "run", STEP, batch, result, ADVANTAGES, 2, 0)
    found, (read,), bad = read_all(tmp_path)
    assert (found.format, bad) == ("open-instruct", [])
    assert [float(x) for x in read.logp_rollout] == [x for row in logprobs for x in row]
    assert [float(x) for x in read.rewards] == REWARDS
    assert [int(x) for x in read.step] == [STEP] * count
    leave("open_instruct")


def test_rollout_dumps_of_miles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages(monkeypatch, source("miles"), *("miles", "miles.utils", "miles.ray", "miles.ray.rollout"))
    types = importlib.import_module("miles.utils.types")
    module = importlib.import_module("miles.ray.rollout.debug_data")
    monkeypatch.setitem(sys.modules, "polars", None)  # whose file mirrors the dump
    path = str(tmp_path / "rollout_data" / "{rollout_id}.pt")
    args = SimpleNamespace(save_debug_rollout_data=path, save_debug_trajectory_data=None)
    module.save_debug_rollout_data(args, samples_of(types), STEP, evaluation=False)
    check_read(tmp_path, "miles-rollout", trainer=False)
    leave("miles")


def padded(rows: list[list[Any]], fill: Any) -> torch.Tensor:
    """Prompt and response, with padding behind."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def over_prompts(value: Any) -> list[list[Any]]:
    """A number of each token of prompt and response; 0 at the prompt."""
    return [[0.0] * len(PROMPTS[s]) + [value(s, t) for t in range(LENGTHS[s])] for s in RANGE]


def test_train_data_of_nemo_rl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its fields are those of `grpo.py`, and its logger writes them."""
    root = source("nemo-rl")
    packages(monkeypatch, root, "nemo_rl", "nemo_rl.distributed", "nemo_rl.utils")
    unread = ("data", "data.interfaces", "data.multimodal_utils", "data.packing", "distributed.collectives")
    hollow(monkeypatch, *(f"nemo_rl.{name}" for name in unread))
    theirs = ("mlflow", "swanlab", "wandb", "prometheus_client", "prometheus_client.parser")
    hollow(monkeypatch, *theirs, "prometheus_client.samples", "torch.utils.tensorboard")
    empty(monkeypatch, "matplotlib", pyplot=SimpleNamespace(Figure=object))
    monkeypatch.setattr(sys.modules["nemo_rl.data.multimodal_utils"], "NATIVE_MULTIMODAL_KEYS", (), raising=False)
    monkeypatch.setattr(sys.modules["nemo_rl.data.multimodal_utils"], "MULTIMODAL_CONTENT_TYPES", (), raising=False)
    logger = real.quietly("nemo_rl.utils.logger")
    data = {
        "content": [[{"role": "assistant", "content": text}] for text in TEXTS],
        "rewards": REWARDS,
        "input_lengths": [len(p) + n for p, n in zip(PROMPTS, LENGTHS, strict=True)],
        "token_ids": padded([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)], 0).tolist(),
        "token_loss_mask": padded(over_prompts(lambda s, t: float(MASK[s][t])), 0.0).tolist(),
        "sample_loss_mask": [1.0] * len(PROMPTS),
        "advantages": padded(over_prompts(lambda s, t: ADVANTAGES[s]), 0.0).tolist(),
        "generation_logprobs": padded(over_prompts(rollout_logp), 0.0).tolist(),
        "prev_logprobs": padded(over_prompts(trainer_logp), 0.0).tolist(),
    }
    text = (root / "nemo_rl" / "algorithms" / "grpo.py").read_text()
    assert all(f'log_data["{name}"] = ' in text for name in data)
    writer = SimpleNamespace(base_log_dir=str(tmp_path))
    logger.Logger.log_batched_dict_as_jsonl(writer, data, f"train_data_step{STEP}.jsonl")
    check_read(tmp_path, "nemo-rl")
    leave("nemo_rl")


def test_token_exports_of_prime_rl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One packed micro-batch, as its trainer exports it."""
    root = source("prime-rl") / "src"
    packages(monkeypatch, root, "prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl")
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))
    hollow(monkeypatch, *(f"prime_rl.{name}" for name in ("configs", "configs.trainer", "utils", "utils.utils")))
    module = importlib.import_module("prime_rl.trainer.rl.token_export")
    flat = {
        "input_ids": [x for p, r in zip(PROMPTS, RESPONSES, strict=True) for x in p + r],
        "position_ids": [i for p, n in zip(PROMPTS, LENGTHS, strict=True) for i in range(len(p) + n)],
        "loss_mask": [bool(x) for row in over_prompts(lambda s, t: MASK[s][t]) for x in row],
        "advantages": [x for row in over_prompts(lambda s, t: ADVANTAGES[s]) for x in row],
        "inference_logprobs": [x for row in over_prompts(rollout_logp) for x in row],
    }
    micro_batch = {name: torch.tensor(x)[None] for name, x in flat.items()} | {
        "env_names": ["sums"] * len(flat["loss_mask"])
    }
    logp = torch.tensor([x for row in over_prompts(trainer_logp) for x in row])[None]
    exporter = module.TokenExporter(tmp_path, 0)
    lengths = [len(p) + n for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    exporter.export(STEP, 0, micro_batch, {"logprobs": logp, "entropy": logp.abs()}, lengths, None)
    exporter.mark_stable()
    found, (batch,), bad = read_all(tmp_path)
    assert (found.format, bad) == ("prime-rl", [])
    assert [float(x) for x in batch.logp_rollout] == [rollout_logp(s, t) for s, t in places()]
    assert [float(x) for x in batch.logp] == [trainer_logp(s, t) for s, t in places()]
    assert os.path.isfile(tmp_path / "token_exports" / f"step_{STEP}" / "STABLE")
    leave("prime_rl")
