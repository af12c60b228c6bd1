"""Estimators that compare a sequence with its siblings: the other answers to the same prompt.

R_i is a sequence's reward, T_i its number of trainable tokens; mean, std (with n - 1) and best are taken over the
siblings that count, n of them, itself included. A group in which one sequence counts has mean 0 and std 1 unless a
function says otherwise. Every token gets its sequence's advantage.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.advantages.base import Credit, best_and_second, group_mean, group_std, whiten, without_spread
from offdrift.errors import BadValueError

EPS = 1e-6
"""Added to a standard deviation before dividing: verl's value."""


def grpo(credit: Credit) -> Float[Tensor, " n"]:
    """Distance from the siblings' mean in standard deviations. Gradient: none.

        A_i = (R_i - mean) / (std + 1e-6)

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([2, 1], group_ids=torch.tensor([7, 7]))
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="grpo")
        tensor([ 0.7071,  0.7071, -0.7071])

    Reference: GRPO, arXiv:2402.03300, section 4.1.
    """
    return credit.segments.spread(_standardized(credit.scores, credit))


def dr_grpo(credit: Credit) -> Float[Tensor, " n"]:
    """Distance from the siblings' mean, in reward units. Gradient: none.

        A_i = R_i - mean

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([2, 1], group_ids=torch.tensor([7, 7]))
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="dr_grpo")
        tensor([ 0.5000,  0.5000, -0.5000])

    Reference: Dr. GRPO, arXiv:2503.20783.
    """
    return credit.segments.spread(_centered(credit))


def batch_mean(credit: Credit) -> Float[Tensor, " n"]:
    """Distance from the mean reward of the batch, over all prompts and processes, in reward units. Gradient: none.

        A_i = R_i - mean of R over the sequences that count, 0 if none does

    Needs no siblings: one answer to each prompt will do. A prompt's difficulty stays in the advantage.

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([2, 1])
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="batch_mean")
        tensor([ 0.5000,  0.5000, -0.5000])

    Reference: the baseline of FlashREINFORCE, OpenRLHF 0.11.2, after a description.
    """
    sums = credit.total(torch.stack([(credit.scores * credit.counts).sum(), credit.counts.sum()]))
    return credit.segments.spread((credit.scores - sums[0] / sums[1].clamp(min=1)).where(sums[1] > 0, 0.0))


def grpo_passk(credit: Credit) -> Float[Tensor, " n"]:
    """Only the best sibling learns: its lead over the second best. Gradient: none.

        A_best = (R_best - R_second) / (std + 1e-6), all others 0; a tie for best gives 0

    Raises: `BadValueError` naming the group if a prompt has one sequence. If it has more and a gate
        kept fewer than two, nobody leads: 0.

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([2, 1], group_ids=torch.tensor([7, 7]))
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="grpo_passk")
        tensor([1.4142, 1.4142, 0.0000])

    Reference: arXiv:2503.19595, as implemented in verl.
    """
    _refuse_lone_sequences(credit)
    scores = credit.scores
    best, second = best_and_second(scores, credit)
    lead = (scores - second) / (group_std(scores, credit) + EPS)
    leads = (scores == best) & (credit.counts > 0) & (credit.siblings > 1)
    return credit.segments.spread(lead.where(leads, 0.0))


def rloo(credit: Credit) -> Float[Tensor, " n"]:
    """Distance from the mean of the *other* siblings; alone, the reward itself. Gradient: none.

        A_i = R_i - sum_{j != i} R_j / (n - 1)

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([2, 1], group_ids=torch.tensor([7, 7]))
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="rloo")
        tensor([ 1.,  1., -1.])

    Reference: RLOO, arXiv:2402.14740, eq. 8.
    """
    difference, _ = _apart_from_others(credit)
    return credit.segments.spread(difference)


def rloo_vectorized(credit: Credit) -> Float[Tensor, " n"]:
    """`rloo`, except that a sequence without others learns nothing. Gradient: none.

        A_i = R_i - sum_{j != i} R_j / (n - 1), 0 if there is no other

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([1, 1, 1], group_ids=torch.tensor([7, 7, 9]))
        >>> od.advantages(torch.tensor([1.0, 0.0, 1.0]), s, how="rloo_vectorized")
        tensor([ 1., -1.,  0.])

    Reference: RLOO, arXiv:2402.14740, eq. 8, as in verl's vectorized implementation.
    """
    difference, others = _apart_from_others(credit)
    return credit.segments.spread(difference.where(others > 0, 0.0))


def opo(credit: Credit) -> Float[Tensor, " n"]:
    """Distance from the siblings' mean weighted by length. Gradient: none.

        A_i = R_i - sum_j T_j R_j / sum_j T_j

    Optimal if a sequence's gradient norm grows with its length, and on-policy.

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([3, 1], group_ids=torch.tensor([7, 7]))
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="opo")
        tensor([ 0.2500,  0.2500,  0.2500, -0.7500])

    Reference: OPO, arXiv:2505.23585.
    """
    groups = credit.segments.groups
    lengths = credit.segments.lengths.to(credit.scores.dtype) * credit.counts
    tokens = groups.sum(lengths).clamp(min=1)
    baseline = groups.spread(groups.sum(lengths * credit.scores) / tokens)
    return credit.segments.spread(credit.scores - baseline.where(credit.siblings > 1, 0.0))


def gpg(credit: Credit) -> Float[Tensor, " n"]:
    """Distance from the siblings' mean, scaled up by the share of zero rewards. Gradient: none.

        A_i = alpha (R_i - mean),  alpha = B / max(1, number of R_i != 0)

    with B and the number taken over the counted sequences of all processes.

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([2, 1], group_ids=torch.tensor([7, 7]))
        >>> od.advantages(torch.tensor([1.0, 0.0]), s, how="gpg")
        tensor([ 1.,  1., -1.])

    Reference: GPG, arXiv:2504.02546.
    """
    nonzero = (credit.scores != 0) * credit.counts
    sequences, rewarded = credit.total(torch.stack([credit.counts.sum(), nonzero.sum()]))
    return credit.segments.spread(_centered(credit) * (sequences / rewarded.clamp(min=1)))


def gdpo(credit: Credit) -> Float[Tensor, " n"]:
    """Each component of the reward standardized in its group before they are added. Gradient: none.

        a_i = sum_k omega_k (R_i^k - mean^k) / (std^k + 1e-6),  A = whitened a over all tokens

    Reads `components` and `component_weights` (ones unless given); rewards do not enter.

    Raises: `EvidenceError` without components.

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([1, 1], group_ids=torch.tensor([7, 7]))
        >>> correct, short = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> od.advantages(correct + short, s, how="gdpo", components=torch.stack([correct, short], 1),
        ...               component_weights=torch.tensor([1.0, 0.5]))
        tensor([ 0.7071, -0.7071])

    Reference: GDPO, arXiv:2601.05242.
    """
    components = credit.require("components", "gdpo")
    omega = credit.component_weights
    if omega is None:
        omega = components.new_ones(components.shape[1])
    parts = [_standardized(x, credit) for x in components.unbind(1)]
    added = torch.stack(parts, 1) @ omega if parts else torch.zeros_like(credit.scores)
    return whiten(credit.segments.spread(added), credit)


def reinforce_plus_plus_baseline(credit: Credit) -> Float[Tensor, " n"]:
    """Distance from the siblings' mean, whitened over all tokens. Gradient: none.

        A = whitened (R_i - mean)

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([1, 1], group_ids=torch.tensor([7, 7]))
        >>> od.advantages(torch.tensor([3.0, 0.0]), s, how="reinforce_plus_plus_baseline")
        tensor([ 0.7071, -0.7071])

    Reference: REINFORCE++, arXiv:2501.03262, the variant with a baseline.
    """
    return whiten(credit.segments.spread(_centered(credit)), credit)


def rl_zvp(credit: Credit) -> Float[Tensor, " n"]:
    """`grpo`, but where all siblings earn the same, tokens are pushed by their entropy. Gradient: none.

        A_it = grpo                                in a group whose rewards differ
        A_it =  alpha H_it                         in a group without a spread, R_i >= right_from
        A_it = -alpha (max_k H_ik - H_it)          in a group without a spread, R_i < right_from

    H_it is the policy's entropy at token t, nats, over the whole vocabulary; the maximum is over the response's tokens.
    Right answers are reinforced most where the policy hesitated; wrong ones are discouraged least there, so that it
    goes on exploring. Reads `zvp_alpha` (0.1 in the paper) and `right_from`, the reward from which a response is right.
    A sequence that no sibling counts beside gets what `grpo` gives it.

    Raises: `EvidenceError` without entropies.

    Example:
        >>> import offdrift as od
        >>> s = od.Segments.from_lengths([2, 1], group_ids=torch.tensor([7, 7]))
        >>> entropy = torch.tensor([0.5, 2.0, 1.0])
        >>> od.advantages(torch.tensor([1.0, 1.0]), s, how="rl_zvp", entropy=entropy)
        tensor([0.0500, 0.2000, 0.1000])
        >>> od.advantages(torch.tensor([0.0, 0.0]), s, how="rl_zvp", entropy=entropy)
        tensor([-0.1500,  0.0000,  0.0000])

    Reference: RL-ZVP, arXiv:2509.21880, eq. 5; for what is left in CompassMax, arXiv:2512.07710.
    """
    entropy, segments = credit.require("entropy", "rl_zvp"), credit.segments
    below_most = entropy - segments.spread(segments.max(entropy))
    right = segments.spread(credit.scores >= credit.right_from)
    shaped = credit.zvp_alpha * torch.where(right, entropy, below_most)
    return torch.where(segments.spread(without_spread(credit.scores, credit)), shaped, grpo(credit))


def _centered(credit: Credit) -> Float[Tensor, " b"]:
    return credit.scores - group_mean(credit.scores, credit)


def _standardized(x: Float[Tensor, " b"], credit: Credit) -> Float[Tensor, " b"]:
    return (x - group_mean(x, credit)) / (group_std(x, credit) + EPS)


def _apart_from_others(credit: Credit) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Reward minus the mean of the other counted siblings, and how many those are."""
    groups, counted = credit.segments.groups, credit.scores * credit.counts
    others = credit.siblings - credit.counts
    mean = (groups.spread(groups.sum(counted)) - counted) / others.clamp(min=1)
    return credit.scores - mean.where(others > 0, 0.0), others


def _refuse_lone_sequences(credit: Credit) -> None:
    groups = credit.segments.groups
    alone = groups.spread(groups.sizes) < 2
    if bool(alone.any()):
        i = int(alone.nonzero()[0])
        ids = credit.segments.group_ids
        group = i if ids is None else int(ids[i])
        raise BadValueError(
            f"grpo_passk compares the two best siblings, but group {group} has one sequence "
            f"(sequence {i}); draw at least two per prompt and set group_ids, or choose 'rloo'"
        )
