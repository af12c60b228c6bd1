"""Effect of a mask on the trust region, and meaning of a high acceptance: two remarks of the paper, exactly.

A mask acts on the loss. With A = R - J(mu) the surrogate that is ascended is

    L'_M(pi) = E_mu[A sum_t M_t (w_t - 1)],

M_t = 1 for the full surrogate; for a token mask M_t = 1(|log w_t| <= tau); for a sequence mask M_t = M(y) =
1(KL(c_t) <= delta at every context c_t of y). The pair (mu, pi) is the same for all three, and so are its largest
token KL and every bound that is made of it (Remark 4.1). `compare_masks` enumerates the sequences of small trees.

The sequence mask removes rejected sequences with their importance weights, and their weights can be large however few
they are (Remark 4.3). `rare_pair` is a family in which the share r of rejected sequences is as small as one likes and

    |L - L_masked| = ||A|| E_mu[(1 - M) sum_t w_t] ~ q ||A|| T,   q = 1 - e^-delta under the criterion on exact KL,

where L = E_mu[A sum_t w_t]. The constant is sharp as r goes to 0: a rejected sequence needs a first context outside,
and tokens that lead there, which mu hardly ever draws. If mu puts p and pi q on them at an accepted context, the KL
there is at least that of the two coins, which tends to -log(1 - q) with p, and at most delta. Behind the first context
outside E_mu[w_t | c_t] = 1, so that these tokens count r T at most.

Reference: Li et al., arXiv:2512.23075v5, Remarks 4.1 and 4.3, eqs. 22-24.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.certificate.bounds import unified
from offdrift.errors import BadValueError
from offdrift_lab.exact.markov import MarkovPolicy, pattern
from offdrift_lab.exact.policy import Divergences, TabularPolicy, divergences, perturbed, random_policies, token_kl

MASKS = ("none", "token", "sequence")


@dataclass(frozen=True)
class Masks:
    """M_t of every sequence and position, for `p` pairs."""

    token: Bool[Tensor, "p y t"]
    """|log w_t| <= tau."""
    sequence: Bool[Tensor, "p y"]
    """KL(c_t) <= delta at all its contexts."""
    ratios: Float[Tensor, "p y t"]
    """w_t = pi / mu; 0 where mu cannot draw the token."""
    kl: Float[Tensor, "p y t"]
    """KL(c_t), nats."""

    def of(self, mask: str) -> Bool[Tensor, "p y t"]:
        """M_t of one of `MASKS`.

        Raises: `BadValueError` for another name.
        """
        if mask == "none":
            return torch.ones_like(self.token)
        if mask == "token":
            return self.token
        if mask == "sequence":
            return self.sequence[..., None].expand_as(self.token)
        raise BadValueError(f"mask {mask!r}; choose from {', '.join(MASKS)}")


def masks(rollout: TabularPolicy, current: TabularPolicy, *, tau: float, delta: float) -> Masks:
    """Compute both masks of every sequence, by enumeration. Gradient: of `ratios` to the policies.

    Args:
        tau: largest |log w_t| of a kept token, nats.
        delta: largest KL(rollout || current) at the contexts of a kept sequence, nats.
    """
    count, horizon = rollout.vocab**rollout.horizon, rollout.horizon
    ratios, kls = [], []
    for t, (mu, pi) in enumerate(zip(rollout.levels, current.levels, strict=True)):
        behind = rollout.vocab ** (horizon - 1 - t)  # sequences that share the token of a context
        ratio = torch.where(mu > 0, pi / mu.clamp(min=torch.finfo(mu.dtype).tiny), 0.0)
        ratios.append(ratio.flatten(1).repeat_interleave(behind, dim=1))
        kls.append(token_kl(mu, pi).repeat_interleave(count // mu.shape[1], dim=1))
    together, kl = torch.stack(ratios, -1), torch.stack(kls, -1)
    token = together.detach().log().abs() <= tau
    return Masks(token, (kl.detach() <= delta).all(-1), together, kl.detach())


def surrogate_weights(
    rollout: TabularPolicy, mask: Bool[Tensor, "p y t"], ratios: Float[Tensor, "p y t"]
) -> Float[Tensor, "p y"]:
    """Weight of the reward of each sequence in the masked surrogate: L'_M = sum_y weight(y) R(y).

        mu(y) (S(y) - E_mu[S]),   S(y) = sum_t M_t (w_t - 1)

    the second term is the baseline's, A = R - J(mu). Gradient: to `ratios`; the mask is stopped.

    Reference: Li et al., arXiv:2512.23075v5, eq. 22.
    """
    law = rollout.law().detach()
    total = (mask * (ratios - 1)).sum(-1)
    return law * (total - (law * total).sum(1, keepdim=True))


def worst_shortfall(weights: Float[Tensor, "p y"], gain: Float[Tensor, "p y"]) -> Float[Tensor, " p"]:
    """The largest |J(pi) - J(mu) - L'_M| over all rewards in [0, 1].

    Args:
        weights: of `surrogate_weights`.
        gain: pi(y) - mu(y).
    """
    rest = gain - weights
    return torch.maximum(rest.clamp(min=0).sum(1), (-rest).clamp(min=0).sum(1))


@dataclass(frozen=True)
class MaskRow:
    """One mask over `p` pairs of policies."""

    mask: str
    kept: Float[Tensor, " p"]
    """Share of terms of the loss that are kept, under mu."""
    kl_max: Float[Tensor, " p"]
    """Largest token KL of the pair, nats: of the policies, not of what is kept."""
    kl_max_kept: Float[Tensor, " p"]
    """Largest KL at the contexts of kept terms, nats."""
    bound: Float[Tensor, " p"]
    """B* of the pair."""
    bound_claimed: Float[Tensor, " p"]
    """B*(delta): what Theorem 4.2 would give if the threshold held everywhere."""
    error: Float[Tensor, " p"]
    """The largest |J(pi) - J(mu) - L'_M| over rewards in [0, 1]."""
    kl_max_after: Float[Tensor, " p"]
    """Largest token KL of mu and the policy after ascent on L'_M from pi, nats."""
    gain_after: Float[Tensor, " p"]
    """J of that policy less J(pi), for random rewards."""


def compare_masks(
    rollout: TabularPolicy,
    current: TabularPolicy,
    rewards: Float[Tensor, "p y"],
    *,
    tau: float,
    delta: float,
    constants: str = "paper",
    steps: int = 20,
    lr: float = 0.5,
) -> list[MaskRow]:
    """One row for each of `MASKS`, by enumeration.

    Args:
        rewards: in [0, 1], of every sequence numbered in base v; for the ascent alone.
        tau, delta: thresholds of the token and the sequence mask, nats.
        constants: of the bounds, "paper" or "sharp".
        steps, lr: gradient steps on the logits, with exact gradients and masks anew at every step.
    """
    d, m = divergences(rollout, current), masks(rollout, current, tau=tau, delta=delta)
    law, gain = rollout.law(), current.law() - rollout.law()
    bound = _bounds(d, rollout.horizon, constants)
    claimed = unified(horizon=rollout.horizon, delta=delta, constants=constants).value
    rows = []
    for name in MASKS:
        mask = m.of(name)
        weights = surrogate_weights(rollout, mask, m.ratios)
        possible = (law > 0)[..., None] & mask
        after = _ascended(name, rollout, current, rewards, tau=tau, delta=delta, steps=steps, lr=lr)
        rows.append(
            MaskRow(
                mask=name,
                kept=(law[..., None] * mask).sum((1, 2)) / rollout.horizon,
                kl_max=d.kl_max,
                kl_max_kept=torch.where(possible, m.kl, 0.0).amax((1, 2)),
                bound=bound,
                bound_claimed=torch.full_like(bound, claimed),
                error=worst_shortfall(weights, gain),
                kl_max_after=divergences(rollout, after).kl_max,
                gain_after=((after.law() - current.law()) * rewards).sum(1),
            )
        )
    return rows


def _bounds(d: Divergences, horizon: int, constants: str) -> Float[Tensor, " p"]:
    """B* of every pair, from all its divergences."""
    values = [
        unified(
            horizon=horizon,
            delta=float(d.kl_max[i]),
            eps=float(d.tv_max[i]),
            kl_seq=float(d.kl_seq[i]),
            tv_seq=float(d.tv_seq[i]),
            mean_tv=d.mean_tv[i].numpy(),
            constants=constants,
        ).value
        for i in range(len(d.kl_max))
    ]
    return torch.tensor(values, dtype=torch.float64)


def _ascended(
    name: str,
    rollout: TabularPolicy,
    current: TabularPolicy,
    rewards: Float[Tensor, "p y"],
    *,
    tau: float,
    delta: float,
    steps: int,
    lr: float,
) -> TabularPolicy:
    """Gradient ascent on L'_M from the current policy, data of the rollout policy throughout."""
    logits = [level.log() for level in current.levels]
    for _ in range(steps):
        leaves = [x.detach().requires_grad_() for x in logits]
        policy = TabularPolicy(tuple(x.softmax(-1) for x in leaves))
        m = masks(rollout, policy, tau=tau, delta=delta)
        value = (surrogate_weights(rollout, m.of(name), m.ratios) * rewards).sum()
        logits = [x + lr * g for x, g in zip(leaves, torch.autograd.grad(value, leaves), strict=True)]
    return TabularPolicy(tuple(x.detach().softmax(-1) for x in logits))


def flipped_pairs(
    pairs: int, *, vocab: int, horizon: int, noise: float, flip: float, touched: float, generator: torch.Generator
) -> tuple[TabularPolicy, TabularPolicy]:
    """Rollout and current policy that differ by small noise everywhere and by much at a few contexts.

    Args:
        noise: standard deviation of the noise on all logits, nats.
        flip: of the further noise at flipped contexts, as of a routing flip.
        touched: probability that a context is flipped.
    """
    mu = random_policies(pairs, vocab=vocab, horizon=horizon, generator=generator)
    near = perturbed(mu, scale=noise, generator=generator)
    return mu, perturbed(near, scale=flip, touched=touched, generator=generator)


# -- Remark 4.3: rejection goes to 0, and what masking removes does not ---------------------------

CRITERIA = ("kl", "ratio")


@dataclass(frozen=True)
class Vanishing:
    """One member of the family, at one horizon."""

    criterion: str
    """"kl": KL(c_t) <= delta at every context; "ratio": k2(w_t) = (log w_t)^2 / 2 <= delta at every token."""
    horizon: int
    rejected: float
    """r, the share of rejected sequences under mu."""
    removed: float
    """|L - L_masked|, in units of ||A||."""
    share: float
    """removed / T."""
    limit: float
    """Its limit: 1 - e^-delta ("kl"), or 1 - e^-sqrt(2 delta) ("ratio")."""
    advantage: float
    """||A||, the largest |R - J(mu)|."""


def rare_pair(
    horizon: int, *, rejected: float, delta: float, criterion: str = "kl"
) -> tuple[MarkovPolicy, MarkovPolicy, Bool[Tensor, "s v"]]:
    """A pair whose mask rejects a share `rejected`, with large ratios on it, and the transitions that the mask allows.

    Token 1 is rare under mu (p) and not under pi (q). Under the criterion on exact KL every context has KL <= delta
    until token 1 has occurred; then pi and mu are far apart, and the sequence is rejected. Under the criterion on
    ratios token 1 itself is outside, and all else inside.

    Returns: rollout policy, current policy, and for each state and token whether it is inside.

    Raises: `BadValueError` for a horizon below 2, a share outside (0, 1), a delta that is not above 0, or another
        criterion.
    """
    if criterion not in CRITERIA:
        raise BadValueError(f"criterion {criterion!r}; choose from {', '.join(CRITERIA)}")
    if horizon < 2:
        raise BadValueError(f"horizon = {horizon}; a first token leads to contexts of a second, so give at least 2")
    if not 0 < rejected < 1:
        raise BadValueError(f"rejected = {rejected}; the share of rejected sequences lies between 0 and 1")
    if not 0 < delta < math.inf:
        raise BadValueError(f"delta = {delta}; a trust region's limit on KL is above 0, nats")
    chances = horizon - 1 if criterion == "kl" else horizon
    p = -math.expm1(math.log1p(-rejected) / chances)
    q = limit_of(criterion, delta)
    if p >= q:
        raise BadValueError(
            f"rejected = {rejected} at {horizon} tokens makes the rare token as likely under the rollout policy "
            f"({p:.3g}) as under the current one ({q:.3g}); give a smaller share"
        )
    # Behind token 1 the policies swap their two tokens: KL = (2 f - 1) log(f / (1 - f)) > delta, whatever delta is.
    far = 1 / (1 + math.exp(-delta - 3))
    mu = torch.tensor([[[[1 - p, p], [far, 1 - far]]]], dtype=torch.float64)
    pi = torch.tensor([[[[1 - q, q], [1 - far, far]]]], dtype=torch.float64)
    if criterion == "kl":
        inside = (token_kl(mu, pi) <= delta)[0, 0][:, None].expand(2, 2)
    else:
        pi[..., 1, :] = mu[..., 1, :]
        inside = (pi.log() - mu.log())[0, 0].abs() <= math.sqrt(2 * delta)
    seen_one = pattern(2, [1])
    return MarkovPolicy(seen_one, mu, horizon), MarkovPolicy(seen_one, pi, horizon), inside


def limit_of(criterion: str, delta: float) -> float:
    """The share of ||A|| T that masking removes in the limit of no rejection."""
    return -math.expm1(-delta if criterion == "kl" else -math.sqrt(2 * delta))


def accepted_sums(
    rollout: MarkovPolicy, current: MarkovPolicy, inside: Bool[Tensor, "s v"]
) -> tuple[Float[Tensor, "p s"], Float[Tensor, "p s"]]:
    """E_mu[M 1(last state)] and E_mu[M 1(last state) sum_t w_t], by recursion over positions.

        a' = a K_mu,   b' = b K_mu + a K_pi        with tokens outside left out of both kernels

    Example:
        >>> mu, pi, inside = rare_pair(8, rejected=1e-6, delta=0.05)
        >>> round(1 - float(accepted_sums(mu, pi, inside)[0].sum()), 9)
        1e-06
    """
    machine = rollout.automaton
    rollout_kernel, moved = (machine.kernel(policy.tokens * inside) for policy in (rollout, current))
    a = machine.start.expand(rollout.pairs, -1)
    b = torch.zeros_like(a)
    for t in range(rollout.horizon):
        step, other = (k[:, t if k.shape[1] > 1 else 0] for k in (rollout_kernel, moved))
        b = (b[:, None] @ step + a[:, None] @ other)[:, 0]
        a = (a[:, None] @ step)[:, 0]
    return a, b


def vanishing(horizon: int, *, rejected: float, delta: float, criterion: str = "kl") -> Vanishing:
    """Part of L that the mask removes in the family, with R = 1 where token 1 occurred.

    Args:
        rejected: r, the share of rejected sequences.
        delta: the criterion's threshold, nats.

    Raises: as in `rare_pair`.

    Example:
        >>> v = vanishing(4096, rejected=1e-8, delta=0.05)
        >>> round(v.share, 6), round(v.limit, 6)
        (0.048759, 0.048771)

    Reference: Li et al., arXiv:2512.23075v5, Remark 4.3.
    """
    mu, pi, inside = rare_pair(horizon, rejected=rejected, delta=delta, criterion=criterion)
    everything = torch.ones_like(inside)
    accepted, kept_ratios = accepted_sums(mu, pi, inside)
    total, all_ratios = accepted_sums(mu, pi, everything)
    rewards = torch.tensor([0.0, 1.0], dtype=torch.float64)
    advantages = rewards - float((total @ rewards)[0])
    largest = float(advantages.abs().max())
    removed = abs(float(((all_ratios - kept_ratios) @ advantages)[0])) / largest
    return Vanishing(
        criterion=criterion,
        horizon=horizon,
        rejected=float((total - accepted).sum()),
        removed=removed,
        share=removed / horizon,
        limit=limit_of(criterion, delta),
        advantage=largest,
    )


def vanishing_table(
    horizons: list[int], shares: list[float], *, delta: float, criteria: tuple[str, ...] = CRITERIA
) -> Iterator[Vanishing]:
    """The family at every criterion, rejected share and horizon."""
    for criterion in criteria:
        for share in shares:
            for horizon in horizons:
                yield vanishing(horizon, rejected=share, delta=delta, criterion=criterion)
