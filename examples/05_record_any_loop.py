"""A training loop of one's own, recorded by one call per step, for `offdrift audit`.

The policy is a table of bigrams. Its rollout engine computes in bfloat16 and takes new weights only
every fourth step, so that the log holds what an audit tells apart: two engines, and staleness.

python examples/05_record_any_loop.py [FOLDER]
"""

import copy
import sys
import tempfile
from pathlib import Path

import torch

import offdrift as od

torch.manual_seed(0)
VOCAB, PROMPTS, SAMPLES, TIME, STEPS = 32, 16, 8, 24, 24
folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "log"

policy = torch.nn.Embedding(VOCAB, VOCAB)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)


def draw(first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens after `first`, and the engine's log-prob of each."""
    tokens, logps, last = [], [], first
    for _ in range(TIME):
        logp = engine(last).float().log_softmax(-1)
        last = torch.multinomial(logp.exp(), 1).squeeze(-1)
        tokens.append(last)
        logps.append(logp.gather(-1, last[:, None]).squeeze(-1))
    return torch.stack(tokens, 1), torch.stack(logps, 1)


def score(model: torch.nn.Module, first: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A model's log-prob of each token."""
    before = torch.cat([first[:, None], tokens[:, :-1]], 1)
    return model(before).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


for step in range(STEPS):
    if step % 4 == 0:
        old, old_version = copy.deepcopy(policy), step
        engine = copy.deepcopy(old).bfloat16()
    prompts = torch.randint(VOCAB, (PROMPTS,)).repeat_interleave(SAMPLES)
    with torch.no_grad():
        tokens, logp_rollout = draw(prompts)
        logp_old = score(old, prompts, tokens)
    # A response ends at token 0, which still counts; what comes after is padding.
    mask = (tokens == 0).cumsum(1) - (tokens == 0).long() == 0
    rewards = ((tokens % 2 == 0) & mask).sum(1) / mask.sum(1)
    by_prompt = rewards.view(PROMPTS, SAMPLES)
    advantages = (by_prompt - by_prompt.mean(1, keepdim=True)).flatten()

    logp = score(policy, prompts, tokens)
    lp = od.LogProbs.pack(logp_rollout, logp, logp_old, mask=mask)
    loss = od.policy_loss(lp, od.method("token_tis"), lp.like_caller(advantages[:, None].expand_as(mask))).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    recorder = od.record(
        folder,
        step=step + 1,
        logp_rollout=logp_rollout,
        logp_old=logp_old,
        logp=logp,
        mask=mask,
        advantages=advantages,
        rewards=rewards,
        group_ids=torch.arange(PROMPTS).repeat_interleave(SAMPLES),
        tokens=tokens,
        version=step,
        rollout_version=old_version,
    )
    if step % 8 == 7:
        print(f"step {step + 1:2}   reward {rewards.mean():.3f}   loss {loss:+.4f}")

recorder.close()
print(f"{recorder.written} steps recorded, {recorder.dropped} dropped; now: offdrift audit {folder}")
