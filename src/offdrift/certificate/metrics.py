"""What a certificate logs: name, unit, meaning, and whether larger is better."""

from __future__ import annotations

from typing import NamedTuple


class Logged(NamedTuple):
    """One row of `Certificate.as_metrics`."""

    unit: str
    meaning: str
    larger_is: str


LOGGED = {
    "certificate/bound": Logged("reward", "B*: largest |J(pi) - J(mu) - L'| if the trust region holds at every context, at the upper ends of its inputs' intervals; none where its premise fell", "worse"),
    "certificate/row": Logged("", "which bound attains B*", "neither"),
    "certificate/margin": Logged("reward", "L' - B*, with the sample mean of L': above 0 the paper's condition holds, as an estimate", "better"),
    "certificate/falsified": Logged("", "1 if a token of the batch left the trust region, so that its premise is false; 0 if none did, which proves nothing", "worse"),
    "certificate/delta_hat": Logged("nat", "largest KL(mu || pi) of a token of the batch, upper end; a sampled maximum, not a global one", "worse"),
    "certificate/eps_hat": Logged("1", "largest TV of a token of the batch, upper end", "worse"),
    "certificate/kl_seq": Logged("nat", "mean KL(mu || pi) of whole sequences, upper ends: |J(pi) - J(mu) - L'| is at most its expectation, for any two policies and rewards in [0, 1]", "worse"),
    "certificate/acceptance": Logged("1", "share of sequences that no gate rejected and that surely lie in the trust region", "better"),
    "certificate/surrogate": Logged("reward", "L' = E_mu[R sum_t (w_t - 1)], sample mean", "better"),
    "certificate/surrogate_low": Logged("reward", "lower end of L': rigorous, and vacuous for long sequences", "better"),
    "certificate/surrogate_masked": Logged("reward", "L' over accepted sequences, sample mean", "better"),
    "certificate/gain": Logged("reward", "E_mu[R (min(prod_t w_t, 2) - 1)], sample mean: what the direct guarantee starts from", "better"),
    "certificate/gain_low": Logged("reward", "J(pi) - J(mu) is at least this, with probability 1 - alpha for one policy and one look, by the best guarantee; none after a batch's first update, since the policy has learned from it", "better"),
    "certificate/certified": Logged("", "1 if gain_low is above 0; of n such certificates of a run that gains nothing, up to n alpha are expected, and false", "better"),
    "certificate/route": Logged("", "the guarantee that says most: direct, masked or TRM", "neither"),
    "certificate/unseen": Logged("1", "a fresh prompt's sequences include one outside the trust region with at most this probability", "worse"),
}  # fmt: skip
"""Every number of `Certificate.as_metrics`, in its order."""
