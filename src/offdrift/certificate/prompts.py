"""The design behind the prompts of a certificate: what counts as one independent draw, and what J averages over.

Answers to one prompt are not independent, and a prompt that comes again can mean two things. Taken for the wrong one, a
certificate is false with certainty as soon as prompts come unequally often: where one prompt has 55 % of the draws and
loses by the current policy, J over distinct prompts may rise while J over draws falls. Prompts that share a source (a
document, a template, a repository) are no independent draws either: the source is the draw, and J a mean over sources.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Int, UInt64

from offdrift.errors import RecordError

PromptDesign = Literal["listed", "drawn", "clustered"]
DESIGNS: tuple[PromptDesign, ...] = ("listed", "drawn", "clustered")

AVERAGED = {
    None: "J averages over the distribution that the prompts were drawn from, and none of them came twice",
    "listed": "J averages over distinct prompts, each counted once however often it was answered",
    "drawn": "J averages over draws of prompts: a prompt counts as often as it is drawn",
    "clustered": "J averages over clusters of prompts, each counted once however many prompts and answers it has",
}
"""What J averages over, by design; None where the designs agree, since no prompt came twice."""

DRAWS = {
    None: "prompts are independent draws of one distribution",
    "listed": "the distinct prompts are independent draws of one distribution",
    "drawn": "draws of prompts (each the answers with one group id) are independent, of one distribution",
    "clustered": "the clusters are independent draws of one distribution, and prompts of one cluster may be anything",
}
"""What has to hold of prompts, by design."""


def design_without_groups(
    prompts: Int[np.ndarray, " b"] | UInt64[np.ndarray, " b"],
    design: PromptDesign | None,
    *,
    command: str = "--prompts",
) -> PromptDesign | None:
    """The design of answers that do not say which of them are to one draw of a prompt.

    Several answers to each prompt, as many to every one, are a list that was answered several times. Draws with
    replacement do not come out so even: where some prompts have more answers than others, nobody knows.

    Args:
        prompts: key of each answer's prompt.
        design: as the user says.
        command: the option that says it.

    Raises: `RecordError` for prompts that were answered unequally often, without a design, and for draws that repeat
        prompts: answers to one draw are not independent.
    """
    counts = np.unique(prompts, return_counts=True)[1]
    if len(counts) == len(prompts) or design in ("listed", "clustered"):
        return design
    if design == "drawn":
        raise RecordError(
            f"{len(prompts):,} answers are to {len(counts):,} distinct prompts, and without group ids nobody knows "
            "which of them answer one draw; give the answers to each draw a group_id of their own"
        )
    if counts.max() > counts.min():
        raise RecordError(two_readings(len(prompts), len(counts), of="answers without group ids", command=command))
    return "listed"


def two_readings(draws: int, prompts: int, *, of: str = "groups of answers", command: str = "--prompts") -> str:
    """Return why draws that repeat prompts cannot be judged before their design is known, and how to say it.

    Args:
        draws: groups of answers (or answers, where there are no groups).
        prompts: distinct prompts among them.
        of: what is counted as draws.
        command: the option that says it.

    Example:
        >>> two_readings(40, 19)[:56]
        '40 groups of answers are to 19 distinct prompts, so that'
    """
    return (
        f"{draws:,} {of} are to {prompts:,} distinct prompts, so that J has two readings, and the wrong "
        f"one is certified falsely. Say which it is. {command} listed: a fixed list was answered several times; "
        "answers to a prompt are merged, and J averages over distinct prompts, each counted once. "
        f"{command} drawn: each group's prompt was drawn anew, with replacement, from one distribution; each group "
        "counts, and J averages over draws, a prompt as often as it is drawn"
    )
