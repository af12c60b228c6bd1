"""The divergences written the obvious way: one token at a time, and as one writes them in torch."""

import math

import torch

from offdrift.divergence.exact import ExactDivergences
from tests.divergence.pairs import first_tokens
from tests.oracles import divergence as oracle

INF, NAN = math.inf, math.nan


def truth(mu, pi, tokens=None, temperature=1.0) -> ExactDivergences:
    """From the sums that define each field, one token at a time, in float64, summed exactly."""
    tokens = first_tokens(mu) if tokens is None else tokens
    rows = zip(mu.tolist(), pi.tolist(), tokens.tolist(), strict=True)
    numbers = [true_row(*row, temperature) for row in rows]
    fields = torch.tensor(numbers, dtype=torch.float64).reshape(len(mu), 9)
    return ExactDivergences(*fields.unbind(1))


def true_row(mu, pi, token, temperature):
    log_mu, log_pi = oracle.log_probabilities(mu), oracle.log_probabilities(pi, temperature)
    if math.isnan(log_mu[0]) or math.isnan(log_pi[0]):
        return (NAN,) * 9
    p, q = [math.exp(x) for x in log_mu], [math.exp(x) for x in log_pi]
    both = [a for a in range(len(p)) if log_mu[a] > -INF and log_pi[a] > -INF]
    only_mu = any(log_mu[a] > -INF and log_pi[a] == -INF for a in range(len(p)))
    only_pi = any(log_pi[a] > -INF and log_mu[a] == -INF for a in range(len(p)))
    # (pi - mu)^2 / mu rather than pi^2 / mu - 1, which rounds a small chi2 away.
    chi2 = math.fsum((math.expm1(log_pi[a] - log_mu[a])) ** 2 * p[a] for a in both)
    chi2 += math.fsum(p[a] for a in range(len(p)) if log_pi[a] == -INF)
    return (
        INF if only_mu else math.fsum(p[a] * (log_mu[a] - log_pi[a]) for a in both),
        INF if only_pi else math.fsum(q[a] * (log_pi[a] - log_mu[a]) for a in both),
        math.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
        INF if only_pi else chi2,
        -math.fsum(a * x for a, x in zip(p, log_mu, strict=True) if a > 0),
        -math.fsum(a * x for a, x in zip(q, log_pi, strict=True) if a > 0),
        math.fsum(a * a for a in q),
        log_mu[token],
        log_pi[token],
    )


def naive(mu, pi, tokens, temperature=1.0) -> ExactDivergences:
    """Log-softmax twice and reduce, in the dtype of the logits: what one writes without thinking."""
    log_mu, log_pi = mu.log_softmax(-1), (pi / temperature).log_softmax(-1)
    p, q = log_mu.exp(), log_pi.exp()
    return ExactDivergences(
        (p * (log_mu - log_pi)).sum(-1),
        (q * (log_pi - log_mu)).sum(-1),
        (p - q).abs().sum(-1) / 2,
        (q * q / p).sum(-1) - 1,
        -(p * log_mu).sum(-1),
        -(q * log_pi).sum(-1),
        (q * q).sum(-1),
        *(x.gather(1, tokens[:, None]).squeeze(1) for x in (log_mu, log_pi)),
    )


def naive_loss(of, mu, pi, temperature=1.0):
    """The textbook, through autograd, in the dtype of the logits or float32."""
    dtype = torch.promote_types(pi.dtype, torch.float32)
    log_mu, log_pi = mu.to(dtype).log_softmax(-1), (pi.to(dtype) / temperature).log_softmax(-1)
    if of == "kl_rollout_current":
        return (log_mu.exp() * (log_mu - log_pi)).sum(-1)
    minus = log_mu if of == "kl_current_rollout" else torch.zeros_like(log_mu)
    return (log_pi.exp() * (log_pi - minus)).sum(-1) * (-1 if of == "entropy" else 1)
