"""A generative judge: a language model that reads an answer and says with one of a few labels what it is worth.

    reward(y) = value of argmax_l log p(l | template(prompt, reference, y))          judge.value = "label"
    reward(y) = sum_l value(l) p(l) / sum_l p(l)                                     judge.value = "expected"

Every label is scored, none is drawn: the same text earns the same reward. Three labels with a reference to compare with
are CompassMax's (better, similar, worse): an answer's reward then does not hang on a fine score that falls on either
side of its group's mean.

What is judged is untrusted text. It is cut, it stands between the tags of the template, and neither a tag of the
template nor a token that the judge's tokenizer treats as a sign of its own can occur in it. That keeps an answer from
closing its place and speaking as the user; it does not keep it from flattering.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offdrift.engines.score import chunks, score
from offdrift.errors import RecipeError, RewardError
from offdrift.records.provenance import Provenance, Sampling
from offdrift.records.rollouts import Rollouts
from offdrift.segments import cumulative
from offdrift_lab.train.data.problems import Problem
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.rewards import Rewards
from offdrift_lab.train.settings.sections import JudgeSettings as Settings

PLACE = re.compile(r"\{(prompt|answer|completion)\}")
TAG = re.compile(r"</?[A-Za-z][\w-]*>")


def verdict_rewards(
    log_p: Float[Tensor, "b l"], values: Float[Tensor, " l"], *, expected: bool = False
) -> Float[Tensor, " b"]:
    """The reward of each answer from the log-probs of the labels: the value of the likeliest, or the mean of all.

        values[argmax_l log p_l],   or   sum_l softmax(log p)_l values_l

    Args:
        log_p: log-prob of each label's text, nats; of equal ones the first counts.
        values: what each label is worth.

    Gradient: none is meant to be taken.

    Example:
        >>> log_p, values = torch.tensor([[0.25, 0.75]]).log(), torch.tensor([1.0, 0.0])
        >>> verdict_rewards(log_p, values), verdict_rewards(log_p, values, expected=True)
        (tensor([0.]), tensor([0.2500]))

    Source: labels of a generative reward model, CompassMax-V3-Thinking, arXiv:2512.07710.
    """
    return log_p.softmax(-1) @ values if expected else values[log_p.argmax(-1)]


class Judge:
    """A model that scores labels; called like any reward function, with completions and their problems.

    Raises: `RecipeError` if its tokenizer cannot tell the labels apart.
    """

    def __init__(self, settings: Settings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings, self.model, self.tokenizer = settings, model.eval(), tokenizer
        lead = "" if tokenizer.chat_template or settings.template[-1:].isspace() else " "
        self.labels = [list(tokenizer.encode(lead + x, add_special_tokens=False)) for x in settings.labels]
        for i, label in enumerate(self.labels):
            if not label or any(other[: len(label)] == label for j, other in enumerate(self.labels) if j != i):
                names = list(settings.labels)
                raise RecipeError(
                    f"judge.labels: to the tokenizer of {settings.model}, {names[i]!r} is nothing, or how another "
                    "label begins, which could then never win; choose labels that begin differently"
                )
        added = tokenizer.get_added_vocab()  # type: ignore[operator]
        signs = {*tokenizer.all_special_tokens, *added, *TAG.findall(settings.template)}
        self.forbidden = re.compile("|".join(map(re.escape, sorted(signs, key=len, reverse=True))), re.IGNORECASE)

    def question(self, completion: str, problem: Problem) -> str:
        """Prompt for the judge about one completion: the template filled with prompt, answer and completion, which are
        shortened and cleaned.
        """
        texts = {"prompt": problem.prompt, "answer": problem.answer, "completion": completion}
        limit = self.settings.max_chars

        def text(place: re.Match[str]) -> str:
            x = texts[place[1]]
            return self.forbidden.sub(" ", x if len(x) <= limit else "..." + x[-limit:])

        return PLACE.sub(text, self.settings.template)

    def label_log_probs(self, completions: Sequence[str], problems: Sequence[Problem]) -> Float[Tensor, "b l"]:
        """Log-prob of each label after the question, summed over its tokens, nats; on the host. Gradient: none.

        Raises: `RewardError` if a question is longer than the judge's context.
        """
        asked = [
            Problem(self.question(c, p), "", chat="if_template") for c, p in zip(completions, problems, strict=True)
        ]
        prompts = [prompt_ids(p, self.tokenizer) for p in asked]
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, prompts)) + max(map(len, self.labels))
        if room is not None and longest > room:
            raise RewardError(
                f"the judge {self.settings.model} would read {longest} tokens, and has room for {room}; lower "
                f"judge.max_chars = {self.settings.max_chars}, or shorten judge.template"
            )
        rows = asked_with(prompts, self.labels)
        log_p = torch.zeros(len(rows.finish))
        with torch.no_grad():
            for piece in chunks(rows, token_budget=self.settings.token_budget):
                part = rows.select(piece)
                log_p[piece] = part.segments.sum(score(self.model, part).logp.float().cpu())
        return log_p.reshape(len(prompts), len(self.labels))

    def __call__(self, completions: Sequence[str], problems: Sequence[Problem]) -> Rewards:
        """Rewards of a batch: every label is scored once for every different completion of a problem."""
        pairs = list(zip(completions, problems, strict=True))
        texts = [self.question(*pair) for pair in pairs]
        first = dict(zip(texts, pairs, strict=True))
        log_p = self.label_log_probs(*zip(*first.values(), strict=True)) if first else torch.zeros(0, len(self.labels))
        values = torch.tensor(list(self.settings.labels.values()))
        rewards = verdict_rewards(log_p, values, expected=self.settings.value == "expected")
        of_text = dict(zip(first, rewards.tolist(), strict=True))
        return Rewards(tuple(of_text[text] for text in texts), {})


def asked_with(prompts: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> Rollouts:
    """Every prompt with every label as its response, to be scored: `len(prompts) * len(labels)` sequences."""
    count = len(prompts) * len(labels)
    lengths = torch.tensor([len(x) for x in labels] * len(prompts))
    asked = torch.tensor([len(x) for x in prompts]).repeat_interleave(len(labels))
    tokens = torch.tensor([token for label in labels for token in label]).repeat(len(prompts))
    return Rollouts(
        tokens=tokens,
        logp_rollout=torch.zeros(len(tokens)),
        cu_seqlens=cumulative(lengths),
        rollout_version=torch.zeros_like(tokens),
        prompt_tokens=torch.tensor([token for prompt in prompts for _ in labels for token in prompt]),
        prompt_cu_seqlens=cumulative(asked),
        group_ids=torch.arange(len(prompts)).repeat_interleave(len(labels)),
        finish=("stop",) * count,
        provenance=Provenance(
            "judge", "", "", dtype="float32", quantization=None, sampling=Sampling(int(lengths.max()))
        ),
    )
