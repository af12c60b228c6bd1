"""Token ids that a model reads: the prompt of a problem, and what answers one of its turns."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from offdrift.errors import RecipeError
from offdrift_lab.train.data.problems import Problem


def in_chat_form(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a problem is asked by the chat template."""
    return bool(problem.chat and (problem.chat != "if_template" or tokenizer.chat_template))


def prompt_ids(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids a model is prompted with: plain text, or the chat template's turns.

    Raises: `RecipeError` if the problem is asked in chat form and the tokenizer has no template.
    """
    if not in_chat_form(problem, tokenizer):
        return list(tokenizer.encode(problem.prompt, add_special_tokens=False))
    if not tokenizer.chat_template:
        raise RecipeError(
            f"the problem {problem.prompt[:40]!r} is asked in chat form and the model's tokenizer "
            'has no chat template; choose task = "arithmetic" or a chat model ("smollm2-135m")'
        )
    turns = [dict(m) for m in problem.messages] or [{"role": "user", "content": problem.prompt}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(str(text), add_special_tokens=False))


TURN = "2f6c1e"
"""Stands for a turn of the model while the chat template says what surrounds it."""


def answer_ids(answer: str, problem: Problem, tokenizer: PreTrainedTokenizerBase, *, after: str) -> list[int]:
    """The token ids that a model reads between two of its turns: plain text, or a user's turn of the chat template.

    Args:
        after: the token that ended the turn, as text, or "" if it ended without one. Where the template writes that
            token itself, it is not repeated.

    Raises: `RecipeError` if the template does not show the model's earlier turns.
    """
    if not in_chat_form(problem, tokenizer):
        return list(tokenizer.encode(answer, add_special_tokens=False))
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": TURN},
        {"role": "user", "content": answer.strip()},
    ]
    text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    _, shown, between = text.partition(TURN)
    if not shown:
        raise RecipeError(
            "the chat template of the model's tokenizer does not show earlier turns of the model, so no environment "
            "can answer them; choose another model, or a task of one turn"
        )
    return list(tokenizer.encode(between.removeprefix(after), add_special_tokens=False))
