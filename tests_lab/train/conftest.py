"""A task and a recipe small enough to train on in a test, with rewards that really vary."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offdrift import models
from offdrift.engines.score import left_right_padded, score
from offdrift.models import CHARACTERS, tiny_qwen3_config
from offdrift.records.rollouts import Rollouts
from offdrift.records.store import read
from offdrift_lab.train.data.environments import Answer
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.tasks import TASKS
from offdrift_lab.train.loop import arm, loop
from offdrift_lab.train.settings.recipe import Recipe, check_recipe


@dataclass(frozen=True)
class Digits:
    """Prompts are sums; a completion earns the share of its characters that are digits."""

    name: str = "digits"

    def sample(self, n: int, *, seed: int, split: str = "train") -> list[Problem]:
        shift = 500 if split == "eval" else 0
        return [Problem(f"{(seed * 31 + i + shift) % 977}+{i % 10}=", "0") for i in range(n)]

    def reward(self, completion: str, problem: Problem) -> float:
        return sum(c.isdigit() for c in completion) / max(1, len(completion))


@pytest.fixture(autouse=True, scope="package")
def digits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "digits", Digits())
        yield


STOPS = (*"=+-*", *(x + y for x in CHARACTERS for y in "abc/"))
"""Texts of one token, which an engine stops at, and of two, which it does not know."""


@dataclass(frozen=True)
class Echo:
    """Answers "ok" with the number of the turn and the prompt, twice."""

    name: str = "echo"
    stops: tuple[str, ...] = STOPS

    def sample(self, n: int, *, seed: int, split: str = "train") -> list[Problem]:
        shift = 500 if split == "eval" else 0
        return [Problem(f"{(seed * 31 + i + shift) % 977}", "0", ("1=", "2=", "3=")) for i in range(n)]

    def start(self, problem: Problem) -> Echoing:
        return Echoing(problem.prompt)


@dataclass
class Echoing:
    prompt: str
    turns: list[str] = field(default_factory=list)

    def answer(self, text: str) -> Answer:
        """A turn earns the share of its characters that are digits."""
        self.turns.append(text)
        digits = sum(c.isdigit() for c in text) / max(1, len(text))
        return Answer(f"ok{len(self.turns)}{self.prompt}", digits / 3, done=len(self.turns) == 3)


def check_episodes(rollouts: Rollouts, tokenizer: PreTrainedTokenizerBase) -> None:
    """Turns, context, places, rewards and ends of `Echo`'s episodes are those of a game with what the model wrote."""
    assert rollouts.turns is not None
    assert rollouts.rewards is not None
    assert len(rollouts.rewards.unique()) > 1, "rewards that differ were to be compared"
    padded, widest = left_right_padded(rollouts), int(rollouts.prompt_cu_seqlens.diff().max())
    for i, prompt in enumerate(rollouts.prompts):
        own = slice(*rollouts.cu_seqlens[i : i + 2].tolist())
        ids, turn_ids = rollouts.tokens[own], rollouts.turns.ids[own]
        assert turn_ids.unique().tolist() == list(range(int(turn_ids[-1]) + 1))
        game, expected = Echo().start(Problem(prompt, "0")), [(t, False) for t in tokenizer.encode(prompt)]
        reward, text, answer = 0.0, "", Answer()
        for turn in turn_ids.unique():
            assert not answer.done
            expected += [(t, False) for t in tokenizer.encode(answer.text)]
            written = ids[turn_ids == turn].tolist()
            expected += [(t, True) for t in written]
            text = tokenizer.decode(written)
            answer = game.answer(tokenizer.decode(written, skip_special_tokens=True))
            reward += answer.reward
        columns = padded.attention[i].nonzero()[:, 0]
        trained = torch.isin(columns, widest + padded.columns[padded.rows == i])
        assert list(zip(padded.ids[i, columns].tolist(), trained.tolist(), strict=True)) == expected
        assert rollouts.rewards[i].item() == pytest.approx(reward)
        assert (rollouts.finish[i] == "stop") == (answer.done and text.endswith((*STOPS, "<eos>")))


def check_run_in_turns(arm: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, engine: str) -> None:
    """Three batches of `Echo`'s episodes that a float32 engine drew, with weights of version 0, 0 and 2.

    Args:
        model: with the weights of version 0.
    """
    batches = [read(arm / f"rollouts/batch-{i:06d}.parquet") for i in range(3)]
    metrics = [json.loads(line) for line in (arm / "metrics.jsonl").read_text().splitlines()]
    for rollouts, version, row in zip(batches, (0, 0, 2), metrics, strict=True):
        check_episodes(rollouts, tokenizer)
        assert set(rollouts.rollout_version.tolist()) == {version}
        assert rollouts.provenance.engine == engine
        assert rollouts.turns is not None
        assert rollouts.turns.ids.max() > 0
        assert row["response/turns_mean"] == pytest.approx(len(rollouts.segments.turns) / rollouts.num_sequences)
        with torch.no_grad():
            difference = (score(model, rollouts).logp - rollouts.logp_rollout).abs().max()
        assert (difference < 1e-4) == (version == 0)
    # The trainer's weights are those of the engine in the first and the last update, and one step ahead in the second.
    assert [row["full/k3"] < 1e-8 for row in metrics] == [True, False, True]


def short_arms(patch: pytest.MonkeyPatch) -> None:
    """Train a smaller model, and leave out what takes most of a short arm's time: other tests cover it."""
    config = tiny_qwen3_config()
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 64, 2
    config.layer_types, config.initializer_range = config.layer_types[:2], 0.15
    patch.setattr(models, "tiny_qwen3_config", lambda: config)
    patch.setattr(arm, "check_sync", lambda *args, **options: None)
    patch.setattr(loop, "evaluate", lambda arm: None)


def small_recipe(**changes: Any) -> Recipe:
    """Six batches of 4 x 4 short responses, engine two updates behind, checkpoints often."""
    content: dict[str, Any] = {
        "name": "small",
        "model": "tiny-qwen3",
        "task": "digits",
        "batches": 6,
        "rollout": {"prompts": 4, "samples": 4, "max_tokens": 6},
        "lag": {"sync_every": 2},
        "optim": {"lr": 2e-4},
        "log": {"eval_every": 2, "eval_prompts": 4, "checkpoint_every": 2, "samples_every": 2, "trackers": []},
        "arms": {"trm_max": {"method": "trm_max", "override": {"gate.high": 0.004}}},
    }  # fmt: skip
    for path, value in changes.items():
        part, _, key = path.partition("__")
        if key:
            content.setdefault(part, {})[key] = value
        else:
            content[part] = value
    return check_recipe(content, source="test")
