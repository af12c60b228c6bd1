"""A certificate from stored rollouts: score them with a policy, and say what that proves.

One file at a time is in memory, and of each file only `token_budget` padded tokens are scored at
once; what stays is a row of numbers per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from offdrift.certificate import BatchEvidence, TrustRegion
from offdrift.engines.score import chunks, divergences, score
from offdrift.errors import RecordError
from offdrift.logprobs import LogProbs
from offdrift.rollouts.records import Rollouts
from offdrift.rollouts.store import read

GROUPS_PER_FILE = 2**32
"""Prompts of different files are different prompts: their group ids are kept apart by this."""


@dataclass(frozen=True)
class Judged:
    """What was read, and the evidence in it."""

    files: int
    tokens: int
    evidence: BatchEvidence


def rollout_files(paths: Sequence[Path]) -> list[Path]:
    """The Parquet files among files, folders of files, and arms of a run, in order.

    Raises: `RecordError` naming a path that holds none.
    """
    found: list[Path] = []
    for path in paths:
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        here = sorted(folder.glob("*.parquet")) if folder.is_dir() else [folder]
        if not here or not here[0].is_file():
            raise RecordError(
                f"{path} holds no rollouts; give .parquet files, a folder of them, or an arm of a run "
                "(runs/NAME/arms/ARM)"
            )
        found += here
    return found


def longest_response(files: Sequence[Path]) -> int:
    """The horizon of the files: the most tokens that their sampling allowed."""
    return max(read(file).provenance.sampling.max_tokens for file in files)


@torch.no_grad()
def judge(
    files: Sequence[Path],
    model: nn.Module,
    *,
    region: TrustRegion,
    token_budget: int = 4096,
    tail_log_ratio_cap: float | None = None,
    watch: Callable[[Path, Judged], None] = lambda path, so_far: None,
) -> Judged:
    """The evidence that stored rollouts hold about a policy.

    Args:
        files: of rollouts, with whatever evidence their engine recorded.
        model: the current policy, a causal language model.
        region: what is to be certified, chosen before the rollouts are seen.
        token_budget: padded tokens per forward pass.
        tail_log_ratio_cap: what top-k evidence may assume of its tail, nats.
        watch: called after each file.

    Raises: `RecordError` for a file that is none of ours, or rollouts without rewards in some files
        and with rewards in others.
    """
    model.eval()
    parts: list[BatchEvidence] = []
    tokens = 0
    for i, file in enumerate(files):
        rollouts = read(file)
        rollouts = rollouts.with_(group_ids=rollouts.group_ids + i * GROUPS_PER_FILE)
        for piece in chunks(rollouts, token_budget=token_budget):
            parts.append(_evidence(model, rollouts.select(piece), region, tail_log_ratio_cap))
        tokens += len(rollouts.tokens)
        parts = [BatchEvidence.merge_all(parts)]
        watch(file, Judged(i + 1, tokens, parts[0]))
    if not parts:
        raise RecordError("no rollouts were given; there is nothing to certify")
    return Judged(len(files), tokens, parts[0])


def _evidence(
    model: nn.Module, part: Rollouts, region: TrustRegion, cap: float | None
) -> BatchEvidence:
    said = score(model, part, temperature=part.provenance.sampling.temperature)

    def here(x: Tensor) -> Tensor:
        return x.to(said.logp.device)

    logprobs = LogProbs.pack(
        here(part.logp_rollout),
        said.logp,
        segments=replace(
            part.segments, cu_seqlens=here(part.cu_seqlens), group_ids=here(part.group_ids)
        ),
    )
    found = divergences(part, said.logits, tail_log_ratio_cap=cap)
    rewards = None if part.rewards is None else here(part.rewards)
    return BatchEvidence.of(logprobs, rewards, region=region, divergences=found)
