"""Exact divergences of a batch, and what the batch proves about the policy.

2,000 prompts, one answer each; the policy has learned to open with an even token a little more often,
which is what is rewarded.

python examples/04_certify.py
"""

import torch

import offdrift as od

torch.manual_seed(0)
prompts, length, vocab = 2000, 32, 50
segments = od.Segments.from_lengths([length] * prompts)
logits_rollout = torch.randn(prompts * length, vocab)
logits = logits_rollout + 0.003 * torch.randn_like(logits_rollout)  # another engine
logits[::length, ::2] += 0.3  # what was learned, at the first token
tokens = torch.distributions.Categorical(logits=logits_rollout).sample()
rewards = (tokens[::length] % 2 == 0).float()

found = od.exact_divergences(logits_rollout, logits, tokens=tokens)
assert found.logp_rollout is not None
divergences = {
    "kl_rollout_current": od.Divergence.exact("kl_rollout_current", found.kl_rollout_current),
    "tv_rollout_current": od.Divergence.exact("tv_rollout_current", found.tv),
}
lp = od.LogProbs.pack(found.logp_rollout, found.logp, segments=segments)
region = od.TrustRegion(horizon=length, delta=0.05)
batch = od.BatchEvidence.of(lp, rewards, region=region, divergences=divergences)
certificate = od.certify(batch)

print(f"largest KL of a token {certificate.delta_seen[1]:.2e} nat; KL_seq {certificate.kl_seq:.2e} nat")
print(certificate.verdict)
