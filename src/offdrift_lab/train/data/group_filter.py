"""Filter or extend groups without a spread of rewards while a batch is drawn; penalize long responses.

Where siblings are the baseline, a group whose rewards are all equal teaches nothing. Three things may be done before
the batch is trained on, and act together:

    stages       such a group is enlarged, doubling up to `draws.max_samples`, until its rewards differ
    rounds       further prompts are drawn until the batch is full of groups whose rewards differ (DAPO)
    left out     a file's prompts that were right throughout several visits are not drawn again

What is left of them is what the advantage estimator `rl_zvp` is for. All of it is judged by the task's own reward;
penalties are added afterwards. What was chosen by its rewards is no independent sample: no certificate is given for it.

Sources: DAPO, arXiv:2503.14476, section 3.2 and eq. 13; CompassMax, arXiv:2512.07710; repetitions, arXiv:2502.03373,
appendix C.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.certificate.samples import unit_rewards
from offdrift.records.rollouts import Rollouts, concatenate
from offdrift_lab.train.data.problems import Problem, digest
from offdrift_lab.train.settings import sections as parts


def has_spread(values: Float[Tensor, "b k"], group_ids: Int[Tensor, " b"]) -> Bool[Tensor, " g"]:
    """True for groups whose sequences differ in any column; ids are 0, 1, ... Gradient: none.

        spread_g = any_k ( max_{i in g} x_ik > min_{i in g} x_ik )

    Exact: float32 rewards that are equal are equal. A group of one has no spread.

    Example:
        >>> rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
        >>> has_spread(rewards[:, None], torch.tensor([0, 0, 1, 1, 2, 2]))
        tensor([False, False,  True])

    Source: DAPO, arXiv:2503.14476, section 3.2.
    """
    groups = int(group_ids.max()) + 1 if len(group_ids) else 0
    index = group_ids[:, None].expand_as(values)
    empty = values.new_zeros(groups, values.shape[1])
    highest = empty.scatter_reduce(0, index, values, "amax", include_self=False)
    return (highest > empty.scatter_reduce(0, index, values, "amin", include_self=False)).any(1)


def overlong_punishment(lengths: Int[Tensor, " b"], *, max_tokens: int, cache: int) -> Float[Tensor, " b"]:
    """Penalty on a response for its length, in [-1, 0]. Gradient: none.

        0                                    |y| <= max_tokens - cache
        (max_tokens - cache - |y|) / cache   up to max_tokens
        -1                                   beyond

    Args:
        lengths: tokens of each response.
        max_tokens: longest response, tokens.
        cache: tokens before it over which the punishment rises.

    Example:
        >>> overlong_punishment(torch.tensor([80, 90, 100]), max_tokens=100, cache=20)
        tensor([ 0.0000, -0.5000, -1.0000])

    Source: DAPO, arXiv:2503.14476, eq. 13.
    """
    return ((max_tokens - cache - lengths) / cache).clamp(-1.0, 0.0)


def repeated_share(tokens: Int[Tensor, " n"], lengths: Int[Tensor, " b"], *, ngram: int) -> Float[Tensor, " b"]:
    """The share of a response's n-grams that it has had before. Gradient: none.

        1 - (different n-grams) / (n-grams),   0 for a response of fewer than n tokens

    An n-gram is that many consecutive tokens. Exact and without a loop over tokens: codes of windows are joined in
    pairs until they are n long.

    Example:
        >>> repeated_share(torch.tensor([5, 6, 5, 6, 5, 1, 2, 3]), torch.tensor([5, 3]), ngram=2)
        tensor([0.5000, 0.0000])

    Source: arXiv:2502.03373, appendix C.2; as a share of the response, as in TRL's `get_repetition_penalty_reward`.
    """
    sequence, code, whole = ngrams(tokens, lengths, ngram=ngram)
    different = (sequence * len(tokens) + code)[whole].unique() // max(1, len(tokens))
    counts = torch.bincount(sequence[whole], minlength=len(lengths))
    return 1 - torch.bincount(different, minlength=len(lengths)) / counts.clamp(min=1) - (counts == 0).float()


def ngrams(
    tokens: Int[Tensor, " n"], lengths: Int[Tensor, " b"], *, ngram: int
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"], Bool[Tensor, " n"]]:
    """The sequence of every token, a number for the n-gram that begins there, and whether that is all in the sequence.

    Gradient: none. Equal n-grams have equal numbers, below `n`.
    """
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    place, last = torch.arange(len(tokens)), len(tokens) - 1
    code, width = tokens.unique(return_inverse=True)[1], 1
    while width < ngram and len(tokens):  # a window is known by two that overlap or touch
        shift = min(width, ngram - width)
        ahead = code[(place + shift).clamp(max=last)]
        code, width = (code * len(tokens) + ahead).unique(return_inverse=True)[1], width + shift
    return sequence, code, place + ngram <= lengths.cumsum(0)[sequence]


def penalized(
    rollouts: Rollouts, settings: parts.PenaltiesSettings, *, max_tokens: int, reward_range: tuple[float, float]
) -> Rollouts:
    """The rollouts with penalties in their rewards, each a component of its own beside the task's.

    R = R_task + overlong * punishment - repetition * repeated share

    Raises: `BadValueError` if a reward is outside `reward_range`, which certificates and reports rest on.
    """
    assert rollouts.rewards is not None
    added: dict[str, Tensor] = {}
    if settings.overlong:
        cache = settings.overlong_tokens or max(1, max_tokens // 5)
        punishment = overlong_punishment(rollouts.lengths, max_tokens=max_tokens, cache=cache)
        added["overlong"] = settings.overlong * punishment
    if settings.repetition:
        share = repeated_share(rollouts.tokens, rollouts.lengths, ngram=settings.ngram)
        added["repetition"] = -settings.repetition * share
    if added:
        task = dict(rollouts.components) if rollouts.components else {"task": rollouts.rewards}
        rollouts = rollouts.with_(rewards=rollouts.rewards + sum(added.values()), components=task | added)
    assert rollouts.rewards is not None
    unit_rewards(rollouts.rewards.double().numpy(), reward_range)
    return rollouts


def of_groups(rollouts: Rollouts, groups: Int[Tensor, " g"]) -> Rollouts:
    """The sequences of some groups, whose ids become 0, 1, ... in their old order."""
    rows = torch.isin(rollouts.group_ids, groups).nonzero()[:, 0]
    chosen = rollouts.select(rows)
    return chosen.with_(group_ids=chosen.group_ids.unique(return_inverse=True)[1])


def joined(batches: Sequence[Rollouts]) -> Rollouts:
    """Batches as one, with their groups numbered 0, 1, ... in their order; each has ids 0, 1, ..."""
    numbered, groups = [], 0
    for part in batches:
        if part.num_sequences:
            numbered.append(part.with_(group_ids=part.group_ids + groups))
            groups += int(part.group_ids.max()) + 1
    return concatenate(numbered)


@dataclass
class History:
    """Count for each prompt of the visits in a row in which all responses were right, in this process."""

    settings: parts.DrawsSettings
    right_from: float
    solved: dict[int, int] = field(default_factory=dict)
    """Visits in a row in which all responses were right, by hash of the prompt."""

    def waiting_first(self, problems: list[Problem]) -> list[Problem]:
        """Those that are still drawn, in their order; behind them, in case they run out, those that are left out."""
        if self.settings.leave_out_after is None:
            return problems
        return sorted(problems, key=self.leaves_out)

    def leaves_out(self, problem: Problem) -> bool:
        """Whether the prompt's last groups were all right as often as `draws.leave_out_after` says."""
        needed = self.settings.leave_out_after
        return needed is not None and self.solved.get(_key(problem), 0) >= needed

    def visit(self, problems: Sequence[Problem], drawn: Rollouts) -> None:
        """Take in what these problems' groups, numbered in their order, were rewarded with by the task."""
        if self.settings.leave_out_after is None:
            return
        assert drawn.rewards is not None
        wrong = torch.bincount(drawn.group_ids, (drawn.rewards < self.right_from).double(), len(problems))
        for problem, failed in zip(problems, (wrong > 0).tolist(), strict=True):
            self.solved[_key(problem)] = 0 if failed else self.solved.get(_key(problem), 0) + 1

    @property
    def left_out(self) -> int:
        """Prompts that are not drawn any more."""
        needed = self.settings.leave_out_after
        return 0 if needed is None else sum(n >= needed for n in self.solved.values())

    def state(self) -> list[list[int]]:
        """State for a checkpoint: pairs of prompt hash and count."""
        return [[key, count] for key, count in self.solved.items() if count]


def _key(problem: Problem) -> int:
    return digest(problem.prompt, *(f"{m['role']}: {m['content']}" for m in problem.messages))


COST = ("draws", "rounds", "groups", "responses", "kept_groups", "kept_responses", "filled")
"""What drawing has cost since the last batch: batches, rounds, groups and responses drawn; groups and responses that
went on to training; and groups among them without a spread, because rounds ran out."""
