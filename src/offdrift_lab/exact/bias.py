"""The exact bias of a method's expected gradient as an estimate of the true return's gradient.

    g(pi) = E_mu[-grad loss]   against   grad J(pi) = grad sum_y pi(y) R(y)

Both are sums over all sequences of a small tree. The step is the *population*: one prompt, and each sequence as
often as the rollout policy draws it. For a method that looks at the whole step (mean weights, second moments) that
is the limit of a large batch. Advantages are R(y) - J(mu), an exact baseline; lengths are equal and normalizers
scaled so that on policy each token is pushed by its advantage; penalties to a reference are left out; version lag
is 1. A constant factor on the gradient counts as bias: 0.9 grad J is 10 % off.

Reference: Li et al., arXiv:2512.23075v5, section 2 (J and its surrogate).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.batch_info import BatchInfo
from offdrift.divergence.evidence import Distributions, Divergence
from offdrift.errors import BadValueError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods.method import Bias, Method
from offdrift.segments import Segments
from offdrift_lab.exact.policy import TabularPolicy, token_kl, token_tv

LARGEST_POPULATION = 4096
"""Sequences in the largest population that is tried."""

SMALL = 1e-5
"""Drift at which no published limit acts: the narrowest lies 3e-4 nats from 0."""
LARGE = 1.0
"""Drift at which limits of sequence weights act: standard deviation of the logits' noise, twice."""
ROUNDING = 1e-12
"""A relative bias below this is none; a bias of second order at `SMALL` is about 1e-10."""


@dataclass(frozen=True, kw_only=True)
class DriftProblem:
    """A rollout policy, rewards, and the directions in which the policies after it drift.

    Args:
        rollout: mu, one policy with rational probabilities.
        rewards: of every sequence, numbered in base v.
        to_old: noise on the logits that makes the old policy, one row per context in the order of
            the levels.
        to_current: noise on top of it that makes the current one.
    """

    rollout: TabularPolicy
    rewards: Float[Tensor, " y"]
    to_old: Float[Tensor, "c v"]
    to_current: Float[Tensor, "c v"]

    def drifted(self, scale: float | int) -> tuple[TabularPolicy, Float[Tensor, "c v"]]:
        """Old policy and logits of the current one, at the given drift, nats."""
        old = _rows(self.rollout).log() + scale * self.to_old
        return policy_of(old), old + scale * self.to_current


def random_problem(shares: Sequence[Sequence[int]], *, horizon: int, seed: int) -> DriftProblem:
    """At every context one of the given rows of shares in random order; uniform rewards in
    [-1/2, 1/2], so that there are answers of either sign; normal drift.

    Args:
        shares: probabilities of the next token, as whole numbers: [3, 2, 1] are 1/2, 1/3, 1/6. Rows
            of equal sums keep the population small.

    Example:
        >>> random_problem([[3, 1]], horizon=2, seed=0).rollout.law()
        tensor([[0.5625, 0.1875, 0.1875, 0.0625]], dtype=torch.float64)
    """
    g = torch.Generator().manual_seed(seed)
    rows = torch.tensor(shares, dtype=torch.float64)
    vocab = rows.shape[1]
    contexts = sum(vocab**t for t in range(horizon))
    order = torch.rand(contexts, vocab, generator=g).argsort(1)
    which = torch.randint(len(rows), (contexts,), generator=g)
    chosen = rows[which].gather(1, order)
    return DriftProblem(
        rollout=TabularPolicy(_levels(chosen / chosen.sum(1, keepdim=True))),
        rewards=torch.rand(vocab**horizon, generator=g, dtype=torch.float64) - 0.5,
        to_old=torch.randn(contexts, vocab, generator=g, dtype=torch.float64),
        to_current=torch.randn(contexts, vocab, generator=g, dtype=torch.float64),
    )


@cache
def standard_problems() -> tuple[DriftProblem, ...]:
    """The problems that classify a method: three shapes, the second with rare tokens.

    Entropies differ between contexts, and in the second a rare token has a covariance of log-prob
    and advantage above 1, so that what acts on either can act.
    """
    return (
        random_problem([[3, 2, 1], [4, 1, 1]], horizon=3, seed=0),
        random_problem([[14, 1, 1], [13, 2, 1]], horizon=2, seed=9),
        random_problem([[3, 1], [2, 2]], horizon=4, seed=2),
    )


def policy_of(logits: Float[Tensor, "c v"]) -> TabularPolicy:
    """The policy with these logits at its contexts. Gradient: to `logits`.

    Raises: `ShapeError` if they are not the contexts of a tree.
    """
    return TabularPolicy(_levels(logits.softmax(-1)))


def true_gradient(logits: Float[Tensor, "c v"], rewards: Float[Tensor, " y"]) -> Float[Tensor, "c v"]:
    """grad of J = sum_y pi(y) R(y) with respect to the logits of pi.

    Example:
        >>> true_gradient(torch.zeros(1, 2), torch.tensor([0.0, 1.0]))
        tensor([[-0.2500,  0.2500]])
    """
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        value = (policy_of(leaf).law()[0] * rewards).sum()
    return torch.autograd.grad(value, leaf)[0]


def expected_gradient(
    row: Method, rollout: TabularPolicy, old: TabularPolicy, logits: Float[Tensor, "c v"], rewards: Float[Tensor, " y"]
) -> Float[Tensor, "c v"]:
    """E_mu of minus the gradient of a method's loss with respect to the logits of pi.

    "Expected", and what is left out, are defined at the head of this file. Divergences are exact,
    entropies those of the old policy, which is also the reference; a sequence has two turns, of
    T // 2 tokens and of the rest.

    Args:
        row: the method; its penalty is ignored.
        rollout: mu, one policy. Its probabilities must be multiples of 1/N, N at most
            `LARGEST_POPULATION`, because sequences are repeated in proportion to them.
        old: pi_old.
        logits: of the current policy pi, a row per context in the order of `rollout.levels`.
        rewards: of every sequence, numbered in base v.

    Raises: `BadValueError` if mu is not such a policy; `ShapeError` if the policies live on
        different trees.

    Example:
        >>> from offdrift.methods import method
        >>> mu = TabularPolicy.independent([[0.5, 0.5]])
        >>> args = mu, mu, torch.tensor([[0.0, 1.0]]).double(), torch.tensor([0.0, 1.0]).double()
        >>> expected_gradient(method("none"), *args)  # at mu's sequences: E_mu[A grad log pi]
        tensor([[-0.2500,  0.2500]], dtype=torch.float64)
        >>> true_gradient(*args[2:])
        tensor([[-0.1966,  0.1966]], dtype=torch.float64)
    """
    rows, count = tuple(_rows(rollout).shape), (rollout.vocab**rollout.horizon,)
    for name, x, expected in (("old", _rows(old), rows), ("logits", logits, rows), ("rewards", rewards, count)):
        if tuple(x.shape) != expected:
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}, expected {expected}: one row per context, "
                "one reward per sequence of the rollout policy's tree"
            )
    horizon = rollout.horizon
    sequences = _population(rollout.law()[0])
    # Context and token at every position: contexts are numbered level by level.
    steps = torch.arange(horizon)
    prefix = sequences.unsqueeze(1) // rollout.vocab ** (horizon - 1 - steps)
    before = torch.tensor([sum(rollout.vocab**s for s in range(t)) for t in range(horizon)])
    contexts, tokens = (before + prefix // rollout.vocab).flatten(), (prefix % rollout.vocab).flatten()
    leaf = logits.detach().requires_grad_()
    loss = exact_loss(
        row,
        {"rollout": _rows(rollout), "old": _rows(old), "current": _rows(policy_of(leaf))},
        contexts,
        tokens,
        leaf.log_softmax(-1)[contexts, tokens],
        rewards=rewards[sequences],
        baseline=rollout.law()[0] @ rewards,
        turns=[n for n in (horizon // 2, horizon - horizon // 2) if n],
        divisor=float(len(sequences)),
    )
    return -torch.autograd.grad(loss, leaf)[0]


def exact_loss(
    row: Method,
    laws: Mapping[str, Float[Tensor, "c v"]],
    contexts: Int[Tensor, " n"],
    tokens: Int[Tensor, " n"],
    logp: Float[Tensor, " n"],
    *,
    rewards: Float[Tensor, " b"],
    baseline: Float[Tensor, "*one"],
    turns: Sequence[int],
    divisor: float,
) -> Float[Tensor, ""]:
    """The loss of one step: answers of equal length to one prompt, with what enumeration knows exactly.

    Advantages are rewards minus `baseline`; the old policy is also the reference.

    Args:
        laws: probabilities of the next token in every context, of "rollout", "old" and "current".
        contexts, tokens: of the packed sequences.
        logp: log-probs of the current policy.
        turns: lengths of the turns of each sequence.
        divisor: of the summed loss where every token is pushed by its advantage.

    Gradient: to `logp`, and to the current policy's laws through divergences.
    """
    horizon, sequences = sum(turns), len(rewards)
    segments = Segments.from_lengths(
        torch.full((sequences,), horizon),
        turns=Segments.from_lengths(torch.tensor(turns).repeat(sequences)),
        group_ids=torch.zeros(sequences, dtype=torch.int64),
    )
    exact = {
        f"{kind}_{a}_{b}": function(laws[a], laws[b])[contexts]
        for kind, function in (("kl", token_kl), ("tv", token_tv))
        for a, b in itertools.combinations(("rollout", "old", "current"), 2)
    }
    old = laws["old"].log()[contexts, tokens]
    batch = LogProbs.pack(laws["rollout"].log()[contexts, tokens], logp, old, logp_ref=old, segments=segments)
    return policy_loss(
        batch,
        replace(row, penalty=None),
        segments.spread(rewards - baseline),
        BatchInfo(
            divergences={name: Divergence.exact(name, value) for name, value in exact.items()},
            entropy=torch.special.entr(laws["old"]).sum(-1)[contexts],
            vocab=laws["old"].shape[1],
            rewards=rewards,
            version_lag=torch.ones_like(old),
            distributions=Distributions(laws["old"].log()[contexts], laws["current"].log()[contexts], tokens),
            observed="this_batch",
        ),
        normalizer=divisor / horizon if row.aggregate == "seq_mean_token_mean" else divisor,
    ).loss


def relative_bias(row: Method, scale: float | int, *, problems: Sequence[DriftProblem] | None = None) -> float:
    """Largest |g - grad J| / |grad J| over some problems, at a drift of `scale`.

    Args:
        scale: standard deviation of the logits' drift from mu to pi_old, and again to pi, nats.
        problems: None for `standard_problems()`.

    Example:
        >>> from offdrift.methods import method
        >>> relative_bias(method("full_is"), 1.0) < 1e-12
        True
        >>> relative_bias(method("seq_tis"), 1.0) > 0.1
        True
    """
    biases = []
    for problem in standard_problems() if problems is None else problems:
        old, logits = problem.drifted(scale)
        true = true_gradient(logits, problem.rewards)
        g = expected_gradient(row, problem.rollout, old, logits, problem.rewards)
        biases.append(float((g - true).norm() / true.norm()))
    return max(biases)


def measured_bias(row: Method) -> Bias:
    """Law by which a method's bias grows with the drift, measured at three drifts.

        none                 no bias at a small drift, nor at a large one
        none inside limits   no bias at a small drift, but at a large one
        O(1)                 the bias does not vanish with the drift
        O(drift)             half the drift, half the bias
        O(drift^2)           half the drift, a quarter of the bias

    Raises: `BadValueError` if the bias follows none of these laws.

    Example:
        >>> from offdrift.methods import method
        >>> measured_bias(method("token_is"))
        'O(drift)'
    """
    small = relative_bias(row, SMALL)
    if small < ROUNDING:
        return "none" if relative_bias(row, LARGE) < ROUNDING else "none inside limits"
    half = relative_bias(row, SMALL / 2)
    order = math.log2(small / half)
    laws: dict[int, Bias] = {0: "O(1)", 1: "O(drift)", 2: "O(drift^2)"}
    if round(order) not in laws or abs(order - round(order)) > 0.01:
        raise BadValueError(
            f"the bias is {small:.3g} at drift {SMALL:g} and {half:.3g} at half of it: order "
            f"{order:.3g} in the drift, where 0, 1 or 2 was expected ({row.describe()})"
        )
    return laws[round(order)]


def _levels(rows: Float[Tensor, "c v"]) -> tuple[Tensor, ...]:
    """Rows of all contexts, cut into the levels of a tree."""
    contexts, vocab = rows.shape
    sizes = [1]
    while sum(sizes) < contexts:
        sizes.append(sizes[-1] * vocab)
    if sum(sizes) != contexts:
        raise ShapeError(
            f"{contexts} contexts do not form a tree over {vocab} tokens, which has {sum(sizes[:-1])} or {sum(sizes)}"
        )
    return tuple(level.unsqueeze(0) for level in rows.split(sizes))


def _rows(policy: TabularPolicy) -> Float[Tensor, "c v"]:
    """Probabilities at all contexts of a single policy, in the order of its levels."""
    return torch.cat([level[0] for level in policy.levels])


def _population(law: Float[Tensor, " y"]) -> Int[Tensor, " b"]:
    """Numbers of the sequences of the smallest batch in which each has exactly its share."""
    sizes = torch.arange(1, LARGEST_POPULATION + 1)
    copies = sizes.double().unsqueeze(1) * law
    integral = ((copies - copies.round()).abs() < 1e-9).all(1)
    if not bool(integral.any()):
        raise BadValueError(
            "the rollout policy's sequence probabilities are not all multiples of 1/N for any N up "
            f"to {LARGEST_POPULATION}; take rational probabilities (see `random_problem`)"
        )
    counts = copies[integral.byte().argmax()].round().long()
    return torch.arange(len(law)).repeat_interleave(counts)
