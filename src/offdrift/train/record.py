"""What is stored of every update: metrics with a certificate, findings, samples, the token log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from offdrift.certificate import certify
from offdrift.records.batch import Logged
from offdrift.records.log import write_log
from offdrift.records.rollouts import OLD_STATUS, Rollouts
from offdrift.stats.metrics import summarize
from offdrift.train.arm import Arm
from offdrift.train.batch import Batch
from offdrift.train.source import Shard
from offdrift.train.step import TokenView, Update

KEPT = 4
"""Sequences per sampled update that go to the report."""


def record_update(
    arm: Arm, rollouts: Rollouts, update: Update, *, batch: int, updates_before: int, sampled: bool
) -> None:
    """Store and show an update that the arm has just taken.

    Args:
        rollouts: what the step trained on.
        batch: index of the rollout batch.
        updates_before: earlier updates on the same batch.
        sampled: whether some sequences go to the report.
    """
    run, now = arm.run, time.perf_counter()
    seconds, arm.last_time = now - arm.last_time, now
    assert update.evidence is not None
    # After a batch's first update the policy has learned from its prompts: no certificate covers it.
    fresh = updates_before == 0
    proof = certify(update.evidence, reward_range=run.recipe.reward_range, fresh=fresh)
    metrics = summarize(update.stats)
    statuses = (name for name in reversed(OLD_STATUS) if metrics.get(f"old/{name}_frac"))
    row = {
        "update": arm.version,
        "batch": batch,
        "batch/updates_before": updates_before,
        "divergence/grade": update.stats.grade,
        **metrics,
        "optim/lr": run.recipe.optim.lr * metrics["optim/lr_scale"],
        "old/status": next(statuses, None),
        **proof.as_metrics(),
        "certificate/fresh": fresh,
        "certificate/verdict": proof.verdict,
        "throughput/seconds": seconds,
        "throughput/tokens_per_s": metrics["batch/tokens"] / seconds,
    }
    if run.accelerator.is_main_process:
        arm.files.append("metrics", row)
        if sampled and update.tokens is not None:
            for sample in samples(rollouts, update.tokens, arm.version, run.tokenizer):
                arm.files.append("samples", sample)
    numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
    run.accelerator.log(numbers, step=arm.version)
    arm.report("update", metrics=row)
    for finding in arm.diagnosis.update(row):
        fields = finding.as_dict()
        if run.accelerator.is_main_process:
            arm.files.append("findings", {"update": arm.version, **fields})
        where = f"{arm.name}: update {arm.version}, {finding.severity}"
        arm.report("finding", f"{where}: {finding.symptom} {finding.fix}", fields)


def samples(
    rollouts: Rollouts, view: TokenView, version: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """One line of `samples.jsonl` per sequence that is shown; none if texts or rewards are unknown.

    Shown are the sequence with the worst token, and some spread evenly over the batch's prompts.
    """
    if rollouts.prompts is None or rollouts.rewards is None:
        return []
    kl, tv = (view.divergence(f"{name}_rollout_current") for name in ("kl", "tv"))
    worst = int(rollouts.segments.max(kl.nan_to_num(0.0)).argmax())
    spread = torch.linspace(0, rollouts.num_sequences - 1, KEPT - 1).long().tolist()
    cuts = rollouts.cu_seqlens.tolist()
    lines = []
    for i in dict.fromkeys([worst, *spread]):
        s = slice(cuts[i], cuts[i + 1])
        line = {
            "update": version,
            "prompt": rollouts.prompts[i],
            "reward": float(rollouts.rewards[i]),
            "accepted": bool(view.keep[s].any()),
            "finish": rollouts.finish[i],
            "tokens": [tokenizer.decode([t]) for t in rollouts.tokens[s].tolist()],
            "kl": kl[s].tolist(),
            "tv": tv[s].tolist(),
            "logp_rollout": rollouts.logp_rollout[s].tolist(),
            "weight": view.weight[s].tolist(),
        }
        lines.append(line)
    return lines


@dataclass
class TokenLog:
    """What the trainer knew about every token of a batch when it first used it.

    Written in the plain schema that `offdrift audit` reads (`offdrift.records.log`), from what the
    steps computed anyway: no forward pass is made for it. Each sequence stands in it once, with the
    update that first trained on it and the log-probs that the policy gave it just before.
    """

    batch: Batch
    sequences: list[Tensor] = field(default_factory=list)
    views: list[TokenView] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(self, sequences: Tensor, view: TokenView, *, version: int) -> None:
        """Note a step on some of the sequences, taken from the weights of `version`."""
        self.sequences.append(sequences)
        self.views.append(view)
        self.versions.append(version)

    def write(self, folder: Path, index: int, shard: Shard) -> None:
        """Write the batch's file, sequences in the order in which they were used.

        Raises: `RecordError` if it cannot be written.
        """
        order = torch.cat(self.sequences)
        batch, whole = self.batch, self.batch.rollouts
        used = whole.with_(evidence=None).select(order)
        rows = whole.segments.rows(order)
        counts = torch.tensor([len(s) for s in self.sequences])
        version = torch.tensor(self.versions).repeat_interleave(counts)
        logp = torch.cat([v.logp for v in self.views])
        old = batch.old
        names = self.views[0].lower if all(v.exact for v in self.views) else ()
        worst_status = None  # of each sequence, its worst token's
        if batch.old_status is not None:
            worst_status = used.segments.max(batch.old_status[rows].double()).long()
        log = Logged(
            cu_seqlens=used.cu_seqlens,
            step=version + 1,  # metrics call an update by the number of steps taken after it
            row=torch.arange(1, len(order) + 1),
            response_lengths=used.lengths,
            logp_rollout=used.logp_rollout,
            logp_old=logp if batch.old_is_current else None if old is None else old.logp[rows],
            logp=logp,
            logp_ref=None if batch.logp_ref is None else batch.logp_ref[rows],
            advantages=batch.advantages[rows],
            rewards=used.rewards,
            group_ids=used.group_ids,
            rollout_version=used.rollout_version,
            version=version,
            entropy=torch.cat([v.entropy for v in self.views]),
            divergences={name: torch.cat([v.lower[name] for v in self.views]) for name in names},
            tokens=used.tokens,
            old_status=worst_status,
            truncated=torch.tensor([f == "length" for f in used.finish]).long(),
            prompts=used.prompts,
            completions=used.completions,
        )
        write_log(log, folder / shard.file_name(index))
