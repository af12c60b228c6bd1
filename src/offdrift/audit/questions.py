"""Which questions a log can answer, and what to log to have the others answered."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

LOG = {
    "logp_rollout": "the rollout engine's log-prob of every sampled token, of the distribution that was sampled (vLLM: logprobs=0 with logprobs_mode=processed_logprobs)",
    "logp_old": "the training engine's log-prob of the same tokens before the first update on them",
    "logp": "the training engine's log-prob of the same tokens in the loss (at the first minibatch it is free)",
    "advantages": "the advantages that the loss used",
    "rewards": "the reward of each response",
    "rollout_version": "the version of the weights that drew each response (a counter of synchronizations)",
    "version": "the version of the weights that were trained",
    "group_ids": "an id of the prompt of each response",
    "tokens": "the token ids of the response",
    "exact": "exact divergences per token (kl_rollout_current, tv_rollout_current), from full logits or hidden states",
}
"""How to get each field, in words."""


@dataclass(frozen=True)
class Question:
    """A question, and the fields that answer it: all of `needs`, and one of `either` if any."""

    text: str
    needs: tuple[str, ...]
    either: tuple[str, ...] = ()


QUESTIONS = (
    Question("How long are responses, and how does reward go?", ("rewards",)),
    Question("Do rollout and training engine agree at the same weights?", ("logp_rollout", "logp_old")),
    Question("How far is the trained policy from what drew the tokens?", ("logp_rollout", "logp")),
    Question(
        "Is it the engines or the age of the weights?",
        ("logp_rollout", "rollout_version", "version"),
        ("logp_old", "logp"),
    ),
    Question(
        "What would each method have kept, and at which effective sample size?", ("logp_rollout",), ("logp_old", "logp")
    ),
    Question("Does drift hurt one sign of the advantage more?", ("logp_rollout", "advantages"), ("logp_old", "logp")),
    Question("How much would PPO's clip act?", ("logp_old", "logp", "advantages")),
    Question("Are whole prompt groups lost to rejection?", ("logp_rollout", "group_ids"), ("logp_old", "logp")),
    Question("Which tokens drift?", ("logp_rollout", "tokens"), ("logp_old", "logp")),
    Question("What does it prove about the update?", ("logp_rollout", "rewards", "exact")),
)


def questions(has: Collection[str]) -> list[dict[str, Any]]:
    """Every question, whether these fields answer it, and what to log if not.

    Args:
        has: fields of `Logged` that the log holds; "exact" if it holds exact divergences.

    Example:
        >>> [q["question"] for q in questions({"rewards"}) if q["answered"]]
        ['How long are responses, and how does reward go?']
    """
    return [_answered(question, has) for question in QUESTIONS]


def _answered(question: Question, has: Collection[str]) -> dict[str, Any]:
    missing = [name for name in question.needs if name not in has]
    if question.either and not any(name in has for name in question.either):
        missing.append(question.either[0])
    because = f"the log has no {' and no '.join(_words(m) for m in missing)}" if missing else ""
    return {
        "question": question.text,
        "answered": not missing,
        "because": because,
        "log": "; ".join(LOG[name] for name in missing),
    }


def _words(name: str) -> str:
    return "exact divergences" if name == "exact" else name
