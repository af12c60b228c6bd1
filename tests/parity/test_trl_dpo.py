"""TRL's own DPO loss, called in-process, against the row `online_dpo` with two answers to each prompt."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from offdrift.batch_info import BatchInfo
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, override
from offdrift.stats import summarize

PROMPTS, WIDTH = 6, 9


@pytest.mark.parametrize("beta", [0.1, 1.5])
def test_the_sigmoid_loss(trl, beta):
    from trl import DPOTrainer

    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, WIDTH + 1, (2 * PROMPTS,), generator=g)
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    ref, leaf = (-3 * torch.rand(2 * PROMPTS, WIDTH, generator=g, dtype=torch.float64) for _ in range(2))
    leaf.requires_grad_()

    # Better answers first, then the worse ones; one prompt token before each.
    def forward(**inputs):
        before = torch.zeros(2 * PROMPTS, 1, dtype=torch.float64)
        rest = {name: torch.zeros(2 * PROMPTS, WIDTH) for name in ("entropy", "mean_logits", "is_top1")}
        rest["is_top1"] = rest["is_top1"].bool()
        return SimpleNamespace(log_probs=torch.cat([before, leaf * mask], 1), **rest)

    completion = torch.cat([torch.zeros(2 * PROMPTS, 1, dtype=torch.int64), mask], 1)
    better, worse = (ref * mask).sum(1).chunk(2)
    inputs = {
        "input_ids": torch.ones_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "ref_chosen_logps": better,
        "ref_rejected_logps": worse,
    }
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=Accelerator(cpu=True), aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"], loss_weights=[1.0],
        beta=beta, use_weighting=False, _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    theirs = DPOTrainer._compute_loss(trainer, forward, inputs, False)
    (gradient,) = torch.autograd.grad(theirs, leaf)

    ids = torch.arange(PROMPTS).repeat(2)
    lp = LogProbs.pack(ref, leaf, logp_ref=ref, mask=mask, group_ids=ids)
    rewards = torch.cat([torch.ones(PROMPTS), torch.zeros(PROMPTS)])
    row = override(METHODS["online_dpo"], {"objective.beta": beta})
    result = policy_loss(lp, row, torch.zeros(int(mask.sum())), BatchInfo(rewards=rewards))
    torch.testing.assert_close(result.loss, theirs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(result.loss, leaf)[0], gradient, rtol=1e-9, atol=1e-12)
    assert (gradient[mask.bool()] != 0).all()
    (accuracy,) = trainer._metrics["train"]["rewards/accuracies"]
    assert summarize(result.stats)["preference/accuracy"] == pytest.approx(accuracy)
    assert 0 < accuracy < 1
