"""Episodes: an engine and an environment take turns.

All episodes that are not over are drawn together, turn by turn: the prompt of a turn is everything that stands before
it, so any engine plays any environment. An episode is one sequence of `Rollouts`, whose tokens are the model's; what
the environment wrote is kept beside them as context (`Turns`).

Simplified on purpose: every turn reads its whole prompt again, and a stop text is looked for once the turn is drawn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch
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

ANSWERED = "\n-> "
"""Before an environment's answer in the text of an episode; a line break follows it."""


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
    count, prompts = len(asked), [prompt_ids(p, tokenizer) for p in asked]
    episodes = [start(environment, p) for p in asked]
    before = [list(p) for p in prompts]
    context: list[list[tuple[int, int]]] = [[] for _ in asked]
    turns: list[list[str]] = [[] for _ in asked]
    texts, rewards, stopped = [""] * count, [0.0] * count, [False] * count
    # A stop text that is one token ends the turn in the engine.
    single = [tokenizer.encode(text, add_special_tokens=False) for text in environment.stops]
    ends = {*sampling.stop_token_ids, *(ids[0] for ids in single if len(ids) == 1)}
    of_turn = replace(sampling, max_tokens=sampling.max_tokens // max_turns, stop_token_ids=tuple(sorted(ends)))
    parts: list[Rollouts] = []
    played: list[tuple[int, int, int]] = []  # of every turn drawn: its episode, its number, the tokens that count
    active = list(range(count))
    for turn in range(max_turns):
        part = engine.generate(
            [before[i] for i in active], of_turn, seed=request_seed(seed, turn) if turn else seed, evidence=evidence
        )
        parts.append(part)
        going = []
        for i, tokens in zip(active, part.tokens.split(part.lengths.tolist()), strict=True):
            ids = tokens.tolist()
            length = stop_length(ids, environment.stops, tokenizer)
            ids = ids[:length]
            ended = ids[-1] in sampling.stop_token_ids
            stopped[i] = ended or length is not None or ids[-1] in ends
            played.append((i, turn, len(ids)))
            turns[i].append(str(tokenizer.decode(ids, skip_special_tokens=True)))
            answer = ask(environment, episodes[i], asked[i], turns[i])
            rewards[i] += answer.reward
            texts[i] += turns[i][-1]
            if answer.done or not stopped[i]:
                continue
            stopped[i] = False  # until the environment says that the episode is over
            if turn + 1 < max_turns:
                last = str(tokenizer.decode(ids[-1:])) if ended else ""
                new = answer_ids(answer.text, asked[i], tokenizer, after=last)
                context[i] += [(token, turn + 1) for token in new]
                before[i] += ids + new
                texts[i] += f"{ANSWERED}{answer.text.strip()}\n"
                going.append(i)
        active = going
        if not active:
            break
    prompt_tokens, prompt_cu_seqlens = pack_sequences(prompts)
    pairs = torch.tensor([pair for of_episode in context for pair in of_episode], dtype=torch.int64).reshape(-1, 2)
    none = torch.zeros(0, dtype=torch.int64)
    return joined_turns(
        parts,
        *torch.tensor(played).T,
        turns=Turns(none, pairs[:, 0], pairs[:, 1], cumulative(torch.tensor([len(p) for p in context]))),
        prompt_tokens=prompt_tokens,
        prompt_cu_seqlens=prompt_cu_seqlens,
        provenance=replace(parts[0].provenance, sampling=sampling),
        finish=tuple("stop" if s else "length" for s in stopped),
        group_ids=torch.arange(len(problems)).repeat_interleave(samples),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        prompts=tuple(p.prompt for p in asked),
        completions=tuple(texts),
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
