"""Exact divergences of one batch, and what they allow to be said about the surrogate's error.

python examples/04_certify.py
"""

import torch

import offdrift as od

torch.manual_seed(0)
segments = od.Segments.from_lengths([60, 64, 20, 64])
logits_rollout = torch.randn(segments.num_tokens, 1000)
logits = logits_rollout + 0.01 * torch.randn_like(logits_rollout)
tokens = torch.distributions.Categorical(logits=logits_rollout).sample()
picked = [x.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1) for x in (logits_rollout, logits)]

found = od.exact_divergences(logits_rollout, logits)
kl, tv = found.kl_rollout_current, found.tv
lp = od.LogProbs.pack(*picked, segments=segments)
divergences = {
    "kl_rollout_current": od.Divergence.exact("kl_rollout_current", kl),
    "tv_rollout_current": od.Divergence.exact("tv_rollout_current", tv),
}
stats = od.DriftStats.of(lp, divergences=divergences)
certificate = od.certify(stats, delta=1e-3, horizon=64)

print(f"largest KL of a token {kl.max():.2e} nat, mean {kl.mean():.2e}; largest TV {tv.max():.4f}")
assert certificate.bound is not None
print(
    f"if KL <= 1e-3 at every reachable context, the surrogate is off by at most "
    f"{certificate.bound.value:.3f} ({certificate.bound.name}); this batch: {certificate.precondition}"
)
