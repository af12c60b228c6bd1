"""A bound by Hellinger's distance, finite where the KL of sequences is infinite."""

from __future__ import annotations

CONSTANT = 37.0
"""Largest |Error| / sum_t E_mu[H^2(c_t)] that the proof in docs/certificates.md allows; search reaches 4.6."""


def sequence_hellinger(*, hellinger_seq: float) -> float:
    """Hellinger's distance of tokens, summed over a sequence: no trust region, no support. Not in the paper.

        |Error| <= 37 sum_t E_mu[H^2(c_t)],   H^2(c) = 1 - sum_y sqrt(mu(y|c) pi(y|c))

    for any two policies and rewards in [0, 1]. KL(mu || pi) is infinite as soon as pi cannot draw one
    token that mu can (a filtered current policy); H^2 is at most 1. For small drift H^2 is a quarter of
    KL, so that this bound is about nine times `sequence_kl`: it is worth having where KL is infinite
    or large on rare contexts.

    Args:
        hellinger_seq: sum over positions of the mean squared Hellinger distance, in [0, T].

    Example:
        >>> round(sequence_hellinger(hellinger_seq=0.0025), 6)
        0.0925
    """
    return CONSTANT * hellinger_seq
