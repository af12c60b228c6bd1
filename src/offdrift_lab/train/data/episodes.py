"""Rewarded responses to the problems of a task, or episodes in which an engine and an environment take turns.

All episodes that are not over are drawn together, turn by turn: the prompt of a turn is everything that stands before
it, so any engine plays any environment. An episode is one sequence of `Rollouts`, whose tokens are the model's; what
the environment wrote is kept beside them as context (`Turns`).

Simplified on purpose: every turn reads its whole prompt again, and a stop text is looked for once the turn is drawn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from offdrift.engines import Engine
from offdrift.engines.generate import request_seed
from offdrift.errors import RecipeError
from offdrift.records.provenance import Sampling
from offdrift.records.rollouts import (
    EvidenceKind,
    Rollouts,
    Turns,
    concatenate,
    cumulative,
    evidence_at,
    pack_sequences,
)
from offdrift.segments import Segments
from offdrift_lab.train.data.environments import Environment, ask, start
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.prompts import answer_ids, prompt_ids
from offdrift_lab.train.data.tasks import Task, rewards_of

ANSWERED = "\n-> "
"""Before an environment's answer in the text of an episode; a line break follows it."""


@dataclass(frozen=True)
class TurnEnds:
    """Texts that end a turn of the model before its length does."""

    tokenizer: PreTrainedTokenizerBase
    stops: Sequence[str]
    """Texts of the environment."""
    tokens: frozenset[int]
    """Stop tokens, and the stop texts that are one token: they end the turn in the engine."""

    @classmethod
    def of(cls, environment: Environment, tokenizer: PreTrainedTokenizerBase, sampling: Sampling) -> TurnEnds:
        single = [tokenizer.encode(text, add_special_tokens=False) for text in environment.stops]
        tokens = {*sampling.stop_token_ids, *(ids[0] for ids in single if len(ids) == 1)}
        return cls(tokenizer, environment.stops, frozenset(tokens))

    def cut(self, ids: list[int]) -> tuple[list[int], bool]:
        """Return the tokens of a turn that count, and whether one of its ends was reached."""
        length = stop_length(ids, self.stops, self.tokenizer)
        ids = ids[:length]
        return ids, length is not None or ids[-1] in self.tokens


@dataclass
class PlayedEpisode:
    """An episode in progress, or over: what the model and the environment wrote in turn, and what it was worth."""

    problem: Problem
    environment: Environment
    tokenizer: PreTrainedTokenizerBase
    context: list[tuple[int, int]] = field(default_factory=list)
    """Tokens of the environment behind the prompt, each with the number of the turn that it stands before."""
    turns: list[str] = field(default_factory=list)
    """The model's."""
    text: str = ""
    reward: float = 0.0
    stopped: bool = False
    """Whether the environment ended it, behind a turn that was not cut off."""

    def __post_init__(self) -> None:
        self.prompt = prompt_ids(self.problem, self.tokenizer)
        self.state = start(self.environment, self.problem)
        self.before = list(self.prompt)
        """Tokens that stand before the next turn."""

    def take(self, ids: list[int], *, stopped: bool, stop_tokens: Sequence[int], last: bool) -> bool:
        """Take a turn of the model and let the environment answer; whether another turn follows.

        Args:
            stopped: whether the turn was not cut off by its length.
            stop_tokens: those of the sampling.
            last: whether the episode has no more turns.
        """
        self.turns.append(str(self.tokenizer.decode(ids, skip_special_tokens=True)))
        answer = ask(self.environment, self.state, self.problem, self.turns)
        self.reward += answer.reward
        self.text += self.turns[-1]
        self.stopped = stopped and answer.done
        if answer.done or not stopped or last:
            return False
        after = str(self.tokenizer.decode(ids[-1:])) if ids[-1] in stop_tokens else ""
        new = answer_ids(answer.text, self.problem, self.tokenizer, after=after)
        self.context += [(token, len(self.turns)) for token in new]
        self.before += ids + new
        self.text += f"{ANSWERED}{answer.text.strip()}\n"
        return True


def rollout(
    engine: Engine,
    problems: list[Problem],
    task: Task | Environment,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    samples: int,
    seed: int,
    evidence: EvidenceKind = "sampled",
    max_turns: int = 1,
    alphas: Float[Tensor, " g"] | None = None,
) -> Rollouts:
    """Draw `samples` responses, or episodes, per problem and reward them; the problem's index is the group id.

    Args:
        alphas: share of the engine's teacher in the responses to each problem.
    """
    if isinstance(task, Environment):
        options: dict[str, Any] = {"samples": samples, "max_turns": max_turns, "seed": seed, "evidence": evidence}
        return play(engine, problems, task, tokenizer, sampling, **options)
    asked = [p for p in problems for _ in range(samples)]
    prompts = [prompt_ids(p, tokenizer) for p in asked]
    mixed = {} if alphas is None else {"alphas": alphas.repeat_interleave(samples).tolist()}
    generation = engine.generate(prompts, sampling, seed=seed, evidence=evidence, **mixed)
    responses = generation.tokens.split(generation.lengths.tolist())
    completions = tuple(str(tokenizer.decode(r.tolist(), skip_special_tokens=True)) for r in responses)
    rewards = rewards_of(task, completions, asked)
    return generation.with_(
        group_ids=torch.arange(len(problems)).repeat_interleave(samples),
        rewards=torch.tensor(rewards.total, dtype=torch.float32),
        components={k: torch.tensor(x, dtype=torch.float32) for k, x in rewards.components.items()} or None,
        prompts=tuple(p.prompt for p in asked),
        completions=completions,
    )


def play(
    engine: Engine,
    problems: Sequence[Problem],
    environment: Environment,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    samples: int,
    max_turns: int,
    seed: int,
    evidence: EvidenceKind = "sampled",
) -> Rollouts:
    """Play `samples` episodes of every problem and reward them; the problem's index is the group id.

    An episode is over when the environment says so, when a turn is cut off by its length, or after `max_turns`. The
    last two count as "length", the first as "stop".

    Args:
        sampling: of whole episodes: `max_tokens` of all turns together, of which each has an equal part.

    Raises: `EpisodeError` if the environment fails; `EngineError` as `Engine.generate` does.
    """
    asked = [p for p in problems for _ in range(samples)]
    episodes = [PlayedEpisode(p, environment, tokenizer) for p in asked]
    ends, stop_tokens = TurnEnds.of(environment, tokenizer, sampling), sampling.stop_token_ids
    of_turn = replace(sampling, max_tokens=sampling.max_tokens // max_turns, stop_token_ids=tuple(sorted(ends.tokens)))
    parts: list[Rollouts] = []
    played: list[tuple[int, int, int]] = []  # of every turn drawn: its episode, its number, the tokens that count
    active = list(range(len(episodes)))
    for turn in range(max_turns):
        part = engine.generate(
            [episodes[i].before for i in active],
            of_turn,
            seed=request_seed(seed, turn) if turn else seed,
            evidence=evidence,
        )
        parts.append(part)
        going = []
        for i, tokens in zip(active, part.tokens.split(part.lengths.tolist()), strict=True):
            ids, stopped = ends.cut(tokens.tolist())
            played.append((i, turn, len(ids)))
            if episodes[i].take(ids, stopped=stopped, stop_tokens=stop_tokens, last=turn + 1 == max_turns):
                going.append(i)
        active = going
        if not active:
            break
    prompt_tokens, prompt_cu_seqlens = pack_sequences([e.prompt for e in episodes])
    pairs = torch.tensor([pair for e in episodes for pair in e.context], dtype=torch.int64).reshape(-1, 2)
    none = torch.zeros(0, dtype=torch.int64)
    return joined_turns(
        parts,
        *torch.tensor(played).T,
        turns=Turns(none, pairs[:, 0], pairs[:, 1], cumulative(torch.tensor([len(e.context) for e in episodes]))),
        prompt_tokens=prompt_tokens,
        prompt_cu_seqlens=prompt_cu_seqlens,
        provenance=replace(parts[0].provenance, sampling=sampling),
        finish=tuple("stop" if e.stopped else "length" for e in episodes),
        group_ids=torch.arange(len(problems)).repeat_interleave(samples),
        rewards=torch.tensor([e.reward for e in episodes], dtype=torch.float32),
        prompts=tuple(p.prompt for p in asked),
        completions=tuple(e.text for e in episodes),
    )


def joined_turns(
    parts: Sequence[Rollouts], episode: Tensor, turn: Tensor, length: Tensor, *, turns: Turns, **of_episodes: object
) -> Rollouts:
    """One sequence per episode, from turns that were drawn one after the other.

    Args:
        parts: what was drawn; the three tensors have one entry per sequence in them.
        episode: that the turn is of.
        turn: its number in the episode, ascending.
        length: tokens that count; what follows was drawn in vain.
        turns: the context of the episodes.
        of_episodes: all other fields but those of tokens.
    """
    flat = concatenate(parts)
    segments = Segments(flat.cu_seqlens)
    rows = segments.rows(episode.argsort(stable=True))
    rows = rows[(segments.position < segments.spread(length))[rows]]
    lengths = torch.zeros(int(episode.max()) + 1, dtype=torch.int64).index_add_(0, episode, length)
    return flat.with_(
        tokens=flat.tokens[rows],
        logp_rollout=flat.logp_rollout[rows],
        rollout_version=flat.rollout_version[rows],
        cu_seqlens=cumulative(lengths),
        evidence=None if flat.evidence is None else evidence_at(flat.evidence, rows),
        support=None if flat.support is None else flat.support.select(rows),
        turns=replace(turns, ids=segments.spread(turn)[rows]),
        **of_episodes,
    )


def stop_length(ids: list[int], stops: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Tokens up to the one that completes the first stop text, itself included; None if there is none.

    Example:
        >>> from offdrift.models import tiny_tokenizer
        >>> tokenizer = tiny_tokenizer()
        >>> stop_length(tokenizer.encode("[1+2]3"), ("]",), tokenizer)
        5
    """

    def stops_within(length: int) -> bool:
        text = str(tokenizer.decode(ids[:length], skip_special_tokens=True))
        return any(stop in text for stop in stops)

    if not stops or not stops_within(len(ids)):
        return None
    return bisect_left(range(len(ids)), True, key=stops_within)


def demonstrated(
    problem: Problem, environment: Environment, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, bool]]:
    """The tokens of a problem's demonstration as it is played, prompt included, and which of them the model writes.

    A turn without a stop text ends with the tokenizer's end of a response.

    Raises: `RecipeError` if the problem shows no demonstration; `EpisodeError` if the environment fails.
    """
    if not isinstance(problem.demonstration, tuple):
        raise RecipeError(
            f"task {environment.name!r} shows no demonstrations to start from, a tuple with one text per turn; set the "
            "warm start's steps to 0 and begin with a model that already solves some of it"
        )
    end, episode = int(tokenizer.eos_token_id), start(environment, problem)  # type: ignore[arg-type]
    tokens = [(token, False) for token in prompt_ids(problem, tokenizer)]
    for i, text in enumerate(problem.demonstration):
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        ended = not text.endswith(environment.stops or ("\0",))
        tokens += [(token, True) for token in [*ids, *[end] * ended]]
        answer = ask(environment, episode, problem, problem.demonstration[: i + 1])
        if answer.done:
            break
        last = str(tokenizer.decode([end])) if ended else ""
        tokens += [(token, False) for token in answer_ids(answer.text, problem, tokenizer, after=last)]
    return tokens
