"""Real runs of TRL's trainer, on a tiny model, with rollouts that are not what the trainer says."""

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from offdrift.models import TINY_SHAPE, save_for_engine, tiny_tokenizer

TOKENS = 12
PROMPTS = ["1+2=", "20+3=", "4*5=", "77-8="]


def tiny_model() -> Qwen3ForCausalLM:
    """Two layers, tied head; always the same weights."""
    shape = {**TINY_SHAPE, "hidden_size": 64, "intermediate_size": 128}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3Config(**shape, num_hidden_layers=2, tie_word_embeddings=True, initializer_range=0.1)
        return Qwen3ForCausalLM(config)


def digits(completions: list[str], **_: Any) -> list[float]:
    """Share of digits in what was written."""
    return [sum(c.isdigit() for c in text) / TOKENS for text in completions]


class Sampler:
    """A rollout function that draws from the trainer's own weights, and misreports.

    Args:
        noise: standard deviation of what is added to the log-probs, nats.
        holes: tokens that a tool wrote, in each completion; their log-probs are NaN.
        by_prompt: what is drawn depends on the prompt and the number of its copy within a group alone.
        shift: log-probs are reported one token late.
    """

    def __init__(
        self, noise: float = 0.2, *, holes: slice | None = None, by_prompt: bool = False, shift: bool = False
    ) -> None:
        self.noise, self.holes, self.by_prompt, self.shift = noise, holes, by_prompt, shift
        self.random = torch.Generator().manual_seed(0)
        self.said: list[tuple[list[int], list[float]]] = []
        """Every completion with the log-probs that were reported."""

    @torch.no_grad()
    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        training = model.training
        model.eval()  # else what is drawn is not what the model says
        rows = [
            self.drawn(model, trainer.processing_class, p, prompts[:i].count(p) % trainer.num_generations)
            for i, p in enumerate(prompts)
        ]
        model.train(training)
        self.said += [(ids, logps) for _, ids, logps in rows]
        names = ("prompt_ids", "completion_ids", "logprobs")
        out: dict[str, Any] = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        if self.holes is not None:
            out["env_mask"] = [[1] * len(c) for c in out["completion_ids"]]
            for mask, logps in zip(out["env_mask"], out["logprobs"], strict=True):
                mask[self.holes] = [0] * len(mask[self.holes])
                logps[self.holes] = [float("nan")] * len(logps[self.holes])
        return out

    def drawn(self, model: Any, tokenizer: Any, prompt: str, copy: int) -> tuple[list, list, list]:
        """Token ids of the prompt, of a completion of 10 to 12 tokens, and its log-probs."""
        if self.by_prompt:
            self.random.manual_seed(sum(map(ord, prompt)) * 100 + copy)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        tokens: list[int] = []
        logps: list[float] = []
        for _ in range(TOKENS - copy % 3):
            logp = model(torch.tensor([ids + tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(torch.multinomial(logp.exp(), 1, generator=self.random)))
            noise = self.noise * float(torch.randn((), generator=self.random))
            logps.append(min(0.0, float(logp[tokens[-1]]) + noise))
        return ids, tokens, [logps[-1], *logps[:-1]] if self.shift else logps


class Client:
    """What TRL's trainer asks of a vLLM server, answered by weights that arrive by its own sync."""

    def __init__(self, **_: Any) -> None:
        self.model, self.random = tiny_model().eval(), torch.Generator().manual_seed(0)
        self.synced = 0

    def init_communicator(self, **_: Any) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def close_communicator(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata: list, params: Any) -> None:
        got = {name: weight.clone() for name, weight in params}
        assert [name for name, *_ in metadata] == list(got)
        self.model.load_state_dict(got, strict=False)
        self.synced += 1

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        sampler = Sampler(0.05)
        sampler.random = self.random
        known = SimpleNamespace(encode=lambda ids, **_: ids)
        with torch.no_grad():
            rows = [sampler.drawn(self.model, known, ids, 0) for ids in prompts for _ in range(n)]  # type: ignore
        said = [[[x] for x in logps] for _, _, logps in rows]
        return {"prompt_ids": prompts, "completion_ids": [r[1] for r in rows], "logprobs": said}


class Deaf(Client):
    """A server to which no weight ever arrives: it goes on drawing from those it began with."""

    def update_named_params(self, metadata: list, params: Any) -> None:
        assert len(metadata) == len(list(params))
        self.synced += 1


def trainer(
    folder: Path, *, base: type | None = None, model: Any = None, config: dict | None = None, **named: Any
) -> Any:
    """A trainer on the tiny model, ready to run.

    Args:
        base: `OffdriftGRPOTrainer` if not given.
        config: of `GRPOConfig`, over what is small.
        named: of the trainer.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOConfig

        if base is None:
            from offdrift.adapters.trl import OffdriftGRPOTrainer as base  # type: ignore
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_completion_length": TOKENS,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "gradient_checkpointing": False,
        "max_steps": 2,
        **(config or {}),
    }
    if model is None:
        model = str(folder / "start")
        if os.environ.get("WORLD_SIZE", "1") != "1":
            model = tiny_model()  # one folder for all processes would be read while it is written
        elif not Path(model).exists():
            save_for_engine(tiny_model(), tiny_tokenizer(), model)
    return base(
        model=model,
        reward_funcs=digits,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
        processing_class=tiny_tokenizer(),
        **named,
    )


def steps(of: Any) -> list[dict[str, float]]:
    """What TRL logged at each step."""
    return [row for row in of.state.log_history if "loss" in row]
