"""The same batch under three corrections: a row of the table, a composition, and one's own.

python examples/02_correct_it.py
"""

import torch

import offdrift as od

torch.manual_seed(0)
segments = od.Segments.from_lengths([30, 30, 30], group_ids=torch.tensor([0, 0, 0]))
logp_rollout = -torch.rand(90) * 2 - 0.5
drift = 0.1 * torch.randn(90)
logp_rollout[35], drift[35] = -4.0, 1.5  # one token of the second sequence has run away
logp = (logp_rollout + drift).clamp(max=0).requires_grad_()

lp = od.LogProbs.pack(logp_rollout, logp, segments=segments)
advantages = od.advantages(torch.tensor([1.0, 0.0, 1.0]), segments)

mine = od.Method(
    objective=od.Reinforce(),
    correction=od.Correction(weights=(od.Weight(on="full", cap=1.5),))
    & od.Gate(statistic="ratio", on="full", unit="seq_mean", low=0.9, high=1.1),
    aggregate="token_mean",
)
rows = {"none": od.method("none"), "trm_max_k2": od.override(od.method("trm_max_k2"), {"gate.high": 0.5}), "mine": mine}

for name, row in rows.items():
    result = od.policy_loss(lp, row, advantages)
    (gradient,) = torch.autograd.grad(result.loss, logp, retain_graph=True)
    found = od.summarize(result.stats)
    print(f"{name:11} {row.describe()}")
    print(
        f"{'':11} loss {result.loss.item():+.3f}  accepted {found['gate/acceptance_seq']:.0%}  "
        f"gradient on the runaway token {gradient[35].item():+.4f}"
    )
