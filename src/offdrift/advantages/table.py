"""`ADVANTAGES`: every estimator by name, what it reads and refuses; `advantages` applies one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from offdrift.advantages import AdvantageName, group, optimal, token
from offdrift.advantages.base import WAYS_OUT, Credit, identity
from offdrift.errors import BadValueError, EvidenceError, MethodError, ShapeError, check_choice
from offdrift.numerics import check_tensor
from offdrift.segments import Segments


def check_rewards(rewards: Tensor, segments: Segments) -> None:
    """One finite reward per sequence or per token."""
    check_tensor("rewards", rewards)
    if rewards.shape not in ((len(segments),), (segments.num_tokens,)):
        raise ShapeError(
            f"rewards of shape {tuple(rewards.shape)} for {len(segments)} sequences of {segments.num_tokens} "
            "tokens; give one per sequence or one per token"
        )
    _refuse("reward", rewards, segments, per_sequence=len(rewards) == len(segments))


def check_entries(entries: dict[str, Tensor | None], segments: Segments, *, per_sequence: bool) -> None:
    """One finite entry per sequence or per token, whichever it must be."""
    length = len(segments) if per_sequence else segments.num_tokens
    for name, x in entries.items():
        if x is None:
            continue
        check_tensor(name, x)
        if x.ndim == 0 or len(x) != length or x.ndim != (2 if name == "components" else 1):
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}; expected {length} entries, one per "
                f"{'sequence' if per_sequence else 'token'}"
            )
        _refuse(name, x, segments, per_sequence=per_sequence)


def _refuse(name: str, x: Tensor, segments: Segments, *, per_sequence: bool) -> None:
    """Raise `BadValueError` for the first entry that is not finite."""
    bad = ~x.isfinite()
    if not bool(bad.any()):
        return
    row = int(bad.reshape(len(x), -1).any(1).nonzero()[0])
    sequence = row if per_sequence else int(segments.seq_ids[row])
    where = "" if per_sequence else f" at token {row - int(segments.cu_seqlens[sequence])}"
    raise BadValueError(
        f"{name} of sequence {sequence} is {x[bad][0].item()}{where}; give every sequence finite "
        "numbers or leave it out of the batch"
    )


def check_component_weights(weights: Tensor | None, components: Tensor | None) -> None:
    """One finite weight per column."""
    if weights is None:
        return
    check_tensor("component_weights", weights)
    columns = None if components is None else components.shape[1]
    if columns is not None and weights.shape != (columns,):
        raise ShapeError(
            f"component_weights has shape {tuple(weights.shape)} for {columns} components; give one weight per column"
        )
    if not bool(weights.isfinite().all()):
        raise BadValueError(f"component_weights={weights.tolist()} must be finite numbers")


def check_position(position: Tensor | None, segments: Segments) -> None:
    """Columns grow along each sequence."""
    if position is None or len(position) == 0:
        return
    first = segments.position == 0
    behind = torch.cat([position[:1] - 1, position[:-1]])
    bad = (position < 0) | (~first & (position <= behind))
    if bool(bad.any()):
        token_index = int(bad.nonzero()[0])
        sequence = int(segments.seq_ids[token_index])
        raise BadValueError(
            f"position of sequence {sequence} is {int(position[token_index])} at token "
            f"{token_index - int(segments.cu_seqlens[sequence])}; a token's column in the response "
            "is at least 0 and grows along the sequence"
        )


@dataclass(frozen=True)
class Estimator:
    """One row of `ADVANTAGES`."""

    function: Callable[[Credit], Tensor]
    summary: str
    """What a token's advantage is: one line."""
    reference: str
    needs: tuple[str, ...] = ()
    """Inputs without which it raises `EvidenceError`."""
    reads: tuple[str, ...] = ()
    """Inputs that it uses where they are given."""
    siblings: bool = True
    """Whether its baseline is made of the group's other sequences."""
    stands_for: str = "R"
    """The reward that it makes of R, up to a baseline and a positive constant: the mean of the advantage given
    prompt and response (docs/certificates.md, "Aggregation and normalization"). sigma is the standard deviation of
    a prompt's rewards, p their mean, n the group's size. "" where it makes none."""
    provided: str = ""
    """What that takes for granted."""
    baseline: Literal["response", "token"] = "response"
    """Whether one number is taken off all tokens of a response, or one of its own off each."""

    @property
    def whole_batch(self) -> bool:
        """Whether it takes statistics over all groups of a batch, so that groups cannot be treated one by one."""
        return LARGE in self.provided


GRPO = "arXiv:2402.03300, section 4.1"
OTB = "arXiv:2602.07078"
REINFORCE_PP = "arXiv:2501.03262"
MANY = "many answers to each prompt"
LARGE = "a large batch"

ADVANTAGES: dict[str, Estimator] = {
    "grpo": Estimator(
        group.grpo,
        "reward minus the group's mean, divided by its standard deviation",
        GRPO,
        stands_for="R / sigma",
        provided=MANY,
    ),
    "grpo_vectorized": Estimator(
        group.grpo,
        "grpo: the same numbers; verl's implementation of this name rounds to float32",
        GRPO,
        stands_for="R / sigma",
        provided=MANY,
    ),
    "dr_grpo": Estimator(group.dr_grpo, "reward minus the group's mean", "arXiv:2503.20783"),
    "batch_mean": Estimator(
        group.batch_mean,
        "reward minus the mean reward of the batch",
        "arXiv:2606.17250 (an advantage of the batch); FlashREINFORCE of OpenRLHF 0.11.2",
        siblings=False,
        provided=LARGE,
    ),
    "grpo_passk": Estimator(
        group.grpo_passk,
        "the best sequence's lead over the second best, in standard deviations; others 0",
        "arXiv:2503.19595",
        stands_for="(1 - p)^(n - 1) R",
        provided="rewards are 0 or 1",
    ),
    "rloo": Estimator(
        group.rloo, "reward minus the mean of the others; a lone sequence keeps its reward", "arXiv:2402.14740, eq. 8"
    ),
    "rloo_vectorized": Estimator(
        group.rloo_vectorized, "reward minus the mean of the others; a lone sequence gets 0", "arXiv:2402.14740, eq. 8"
    ),
    "opo": Estimator(group.opo, "reward minus the group's mean weighted by length", "arXiv:2505.23585", provided=MANY),
    "gpg": Estimator(
        group.gpg,
        "reward minus the group's mean, divided by the batch's share of nonzero rewards",
        "arXiv:2504.02546",
        provided=LARGE,
    ),
    "gdpo": Estimator(
        group.gdpo,
        "each reward component standardized in its group, added, whitened over the batch",
        "arXiv:2601.05242",
        needs=("components",),
        reads=("component_weights",),
        stands_for="sum_k omega_k R_k / sigma_k",
        provided=f"{MANY}; {LARGE}",
    ),
    "reinforce_plus_plus_baseline": Estimator(
        group.reinforce_plus_plus_baseline,
        "reward minus the group's mean, whitened over the batch",
        REINFORCE_PP,
        provided=LARGE,
    ),
    "gae": Estimator(
        token.gae,
        "generalized advantage estimation with a critic, whitened over the batch",
        "arXiv:1506.02438, eq. 16",
        needs=("values",),
        reads=("gamma", "lam"),
        siblings=False,
        provided=f"gamma = lam = 1; {LARGE}",
        baseline="token",
    ),
    "reinforce_plus_plus": Estimator(
        token.reinforce_plus_plus,
        "discounted reward-to-go, whitened over the batch",
        REINFORCE_PP,
        reads=("gamma",),
        siblings=False,
        provided=f"gamma = 1; {LARGE}",
    ),
    "remax": Estimator(
        token.remax,
        "reward-to-go minus the reward of a greedy response",
        "arXiv:2310.10505",
        needs=("greedy_rewards",),
        siblings=False,
    ),
    "optimal_token_baseline": Estimator(
        optimal.optimal_token_baseline,
        "reward-to-go minus a least-variance baseline per column of the response",
        OTB,
        needs=("logp_old", "sum_pi_squared"),
        reads=("weight", "position"),
        provided=MANY,
        baseline="token",
    ),
    "tir_optimal_token_baseline": Estimator(
        optimal.tir_optimal_token_baseline,
        "reward-to-go minus a least-variance baseline per count of trainable tokens",
        OTB,
        needs=("logp_old", "sum_pi_squared"),
        reads=("weight",),
        provided=MANY,
        baseline="token",
    ),
    "opob": Estimator(
        optimal.opob,
        "reward minus the least-variance baseline under importance weights",
        "arXiv:2602.17616",
        reads=("weight", "grad_norm_squared", "logp_old", "sum_pi_squared"),
        provided=MANY,
    ),
    "rl_zvp": Estimator(
        group.rl_zvp,
        "grpo; where all siblings earn the same, right tokens gain by their entropy and wrong ones lose by its lack",
        "arXiv:2509.21880, eq. 5",
        needs=("entropy",),
        reads=("right_from", "zvp_alpha"),
        stands_for="",
        baseline="token",
    ),
}
"""Every estimator of the advantage by its name (docs/methods.md): what it needs, and which return it raises."""


def advantages(
    rewards: Real[Tensor, " r"],
    segments: Segments,
    *,
    how: AdvantageName | str = "grpo",
    baseline_over: Literal["sampled", "kept"] = "sampled",
    keep: Bool[Tensor, " b"] | None = None,
    group_ids: Int[Tensor, " b"] | Literal["of_segments"] | None = "of_segments",
    gamma: float | int = 1.0,
    lam: float | int = 1.0,
    values: Float[Tensor, " n"] | None = None,
    greedy_rewards: Float[Tensor, " b"] | None = None,
    components: Float[Tensor, "b k"] | None = None,
    component_weights: Float[Tensor, " k"] | None = None,
    logp_old: Float[Tensor, " n"] | None = None,
    sum_pi_squared: Float[Tensor, " n"] | None = None,
    weight: Float[Tensor, " n"] | None = None,
    grad_norm_squared: Float[Tensor, " b"] | None = None,
    position: Int[Tensor, " n"] | None = None,
    entropy: Float[Tensor, " n"] | None = None,
    right_from: float | int = 1.0,
    zvp_alpha: float | int = 0.1,
    total: Callable[[Tensor], Tensor] = identity,
) -> Float[Tensor, " n"]:
    """Advantage of every token by the named estimator. Gradient: none.

    Which sequences make the baseline is a choice. `"sampled"`: all of them; the baseline estimates
    what the rollout policy earns on the prompt, and a sequence that a gate rejects still tells its
    siblings how hard the prompt was. `"kept"`: only those with `keep`, in every mean, deviation,
    whitening and count, so that the kept get exactly what they would had the rejected never been
    drawn. Advantages of the kept then center on zero in their group, but around a baseline of fewer
    sequences, chosen by the gate. A rejected sequence is measured against its kept siblings; a group
    without a kept one has no baseline, and where siblings make the baseline it gets 0. Unverified:
    best reading.

    Computed in float64, returned in the rewards' dtype (float32 for integers).

    Args:
        rewards: one scalar per sequence in the task's unit, paid on its last token; or one per
            token, whose sum is the sequence's. Of `b` values for `b` sequences, each is a
            sequence's.
        segments: sequences and their prompt groups.
        group_ids: prompt of each sequence; "of_segments" takes those of `segments`, and None says on
            purpose that every sequence answers a prompt of its own: its siblings are none.
        how: a name in `ADVANTAGES`, which says what each one needs and reads; inputs that the
            estimator does not read are checked, then ignored.
        baseline_over: see above.
        keep: whether a gate kept the sequence; read if `baseline_over="kept"`.
        gamma: discount per token, in [0, 1].
        lam: weight of longer returns in `gae`, in [0, 1].
        values: the critic's value at each token, in reward units.
        greedy_rewards: reward of a greedy response to the sequence's prompt.
        components: one column per component of the reward.
        component_weights: weight of each column; ones unless given.
        logp_old: log-probs of the training engine at the weights that sampled, in nats.
        sum_pi_squared: sum over the vocabulary of that policy's squared probabilities.
        weight: mismatch weight of each token; for `opob` the sequence's, on each of its tokens.
        grad_norm_squared: squared norm of each sequence's score gradient.
        position: column of each token in the original response, tool output included; its index
            among the trainable tokens unless given.
        entropy: of the policy whose tokens are weighed, at each token, over the whole vocabulary, in nats.
        right_from: reward from which a sequence is right, for `rl_zvp`.
        zvp_alpha: what `rl_zvp` multiplies entropies by, in reward deviations per nat.
        total: sums a small tensor over all processes, for statistics of the whole batch. Every
            process must hold whole groups.

    Raises: `BadValueError` naming the sequence or token whose reward, or any other input, is not
        finite, or the group that is too small, or groups that contradict those of `segments`;
        `EvidenceError` naming a missing input, such as the groups where siblings make the baseline;
        `ShapeError`; `MethodError` for an unknown name.

    Example:
        >>> s = Segments.from_lengths([2, 1, 1], group_ids=torch.tensor([7, 7, 7]))
        >>> rewards = torch.tensor([1.0, 0.0, 0.5])
        >>> advantages(rewards, s, how="dr_grpo")
        tensor([ 0.5000,  0.5000, -0.5000,  0.0000])
        >>> keep = torch.tensor([True, True, False])
        >>> advantages(rewards + torch.tensor([0.0, 0.0, 8.0]), s, how="dr_grpo",
        ...            baseline_over="kept", keep=keep)
        tensor([ 0.5000,  0.5000, -0.5000,  8.0000])
    """
    check_choice("how", how, tuple(ADVANTAGES))
    check_choice("baseline_over", baseline_over, ("sampled", "kept"))
    if baseline_over == "kept" and keep is None:
        raise EvidenceError(f"baseline_over='kept' needs keep, which was not given; {WAYS_OUT['keep']}")
    for name, x in {"gamma": gamma, "lam": lam}.items():
        if not 0 <= x <= 1:
            raise MethodError(f"{name}={x} must lie in [0, 1]")
    row = ADVANTAGES[how]
    segments = _grouped(segments, group_ids, how if row.siblings else None)
    per_token = {
        "values": values,
        "logp_old": logp_old,
        "sum_pi_squared": sum_pi_squared,
        "weight": weight,
        "position": position,
        "entropy": entropy,
    }
    per_sequence = {
        "keep": keep,
        "greedy_rewards": greedy_rewards,
        "grad_norm_squared": grad_norm_squared,
        "components": components,
    }
    check_rewards(rewards, segments)
    check_entries(per_token, segments, per_sequence=False)
    check_entries(per_sequence, segments, per_sequence=True)
    check_component_weights(component_weights, components)
    check_position(position, segments)
    floats = {**per_token, **per_sequence, "component_weights": component_weights}
    del floats["keep"], floats["position"]
    with torch.no_grad():
        # Equal float32 rewards have a float64 mean equal to them: nothing remains to be normalized.
        credit = Credit(
            rewards=rewards.double(),
            segments=segments,
            counted=keep if baseline_over == "kept" else None,
            gamma=gamma,
            lam=lam,
            position=position,
            right_from=right_from,
            zvp_alpha=zvp_alpha,
            total=total,
            **{name: None if x is None else x.double() for name, x in floats.items()},
        )
        per_token = row.function(credit)
        if row.siblings and credit.counted is not None:
            per_token = per_token.where(segments.spread(credit.siblings > 0), 0.0)
        return per_token.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _grouped(segments: Segments, group_ids: Tensor | str | None, compares_siblings: str | None) -> Segments:
    """The segments with the prompt groups that were asked for.

    Args:
        compares_siblings: name of the estimator, if its baseline is made of siblings.
    """
    if not isinstance(segments, Segments):
        raise BadValueError(
            f"segments is a {type(segments).__name__}; give `logprobs.segments`, or "
            "`Segments.from_lengths(tokens of each sequence)`"
        )
    segments.check()
    if group_ids is None:
        return replace(segments, group_ids=None)
    if not isinstance(group_ids, str):
        return segments.with_groups(group_ids)
    check_choice("group_ids", group_ids, ("of_segments",))
    if compares_siblings is not None and segments.group_ids is None:
        raise EvidenceError(
            f"advantage estimator {compares_siblings!r} compares a sequence with the others of its "
            "prompt, and which those are was not given: give group_ids= (one prompt id per sequence) "
            "here or to LogProbs.pack; group_ids=None says that every sequence is alone with its "
            "prompt; or choose 'reinforce_plus_plus', which needs no siblings"
        )
    return segments
