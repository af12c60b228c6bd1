"""Three log-probs of the same tokens, and what they say about how far the policies have drifted.

python examples/01_see_the_drift.py
"""

import torch

import offdrift as od

torch.manual_seed(0)

# What any training loop has: padded [sequences, time], with a mask for the tokens that may train.
lengths = torch.tensor([12, 40, 7, 25])
mask = torch.arange(40)[None] < lengths[:, None]
logp_rollout = -torch.rand(4, 40) * 3  # what the inference engine says it sampled from
logp_old = logp_rollout + 0.02 * torch.randn(4, 40)  # the training engine, same weights
logp = logp_old + 0.05 * torch.randn(4, 40)  # the training engine, a few updates later

lp = od.LogProbs.pack(logp_rollout, logp.clamp(max=0), logp_old.clamp(max=0), mask=mask)
metrics = od.summarize(od.DriftStats.of(lp))

for pair, meaning in {
    "mismatch": "two engines, same weights",
    "staleness": "one engine, two versions",
    "full": "the two together",
}.items():
    print(
        f"{pair:10} {meaning:28} k3 {metrics[f'{pair}/k3']:.5f} nat   "
        f"chi2 {metrics[f'{pair}/chi2_token']:.4f}   ESS of sequences {metrics[f'{pair}/ess_seq_frac']:.0%}"
    )
