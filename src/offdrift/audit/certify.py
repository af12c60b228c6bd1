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


@dataclass(frozen=True)
class Judged:
    """What was read, and the evidence in it."""

    files: int
    tokens: int
    evidence: BatchEvidence


def rollout_files(paths: Sequence[Path]) -> list[Path]:
    """The Parquet files among files, folders of files, and arms of a run, in order.

    A file that is named twice is there once: its sequences are no further independent draws.

    Raises: `RecordError` naming a path that holds none.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        here = sorted(folder.glob("*.parquet")) if folder.is_dir() else [folder]
        if not here or not here[0].is_file():
            raise RecordError(
                f"{path} holds no rollouts; give .parquet files, a folder of them, or an arm of a run "
                "(runs/NAME/arms/ARM)"
            )
        for file in here:
            found.setdefault(file.resolve(), file)
    return list(found.values())


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
        watch: called after each file, once there are sequences.

    Prompts of different files are different prompts, whatever their group ids.

    Raises: `RecordError` for a file that is none of ours, or files without any sequence;
        `ShapeError` for rollouts without rewards in some files and with rewards in others.
    """
    model.eval()
    parts: list[BatchEvidence] = []
    tokens = prompts = 0
    for i, file in enumerate(files):
        rollouts = read(file)
        found, ids = rollouts.group_ids.unique(return_inverse=True)
        rollouts = rollouts.with_(group_ids=ids + prompts)
        for piece in chunks(rollouts, token_budget=token_budget):
            parts.append(_evidence(model, rollouts.select(piece), region, tail_log_ratio_cap))
        tokens += len(rollouts.tokens)
        prompts += len(found)
        del rollouts  # before the next file is read
        if parts:
            parts = [BatchEvidence.merge_all(parts)]
            watch(file, Judged(i + 1, tokens, parts[0]))
    if not parts:
        raise RecordError("there are no rollouts in what was given; there is nothing to certify")
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
