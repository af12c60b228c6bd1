"""A certificate from stored rollouts: score them with a policy, and say what that proves.

One file at a time is in memory, and of each file only `token_budget` padded tokens are scored at
once; what stays is a row of numbers per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from offdrift.certificate import BatchEvidence, TrustRegion
from offdrift.engines.score import chunks, divergences, score
from offdrift.errors import RecordError
from offdrift.logprobs import LogProbs
from offdrift.records.rollouts import Provenance, Rollouts
from offdrift.records.store import read, read_drawn_by


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
    return max(read_drawn_by(file)[0].sampling.max_tokens for file in files)


def newest_policy(files: Sequence[Path]) -> tuple[int | None, list[Path]]:
    """The newest version among the files' rollout policies, and the files that it alone drew.

    A certificate compares two policies: rollouts of several are several samples, and pooled their
    intervals cover nothing. A batch that was drawn while weights were updated is of no one version.

    Raises: `RecordError` if no file is of one version.
    """
    versions = {file: read_drawn_by(file)[1] for file in files}
    pure = {file: found[0] for file, found in versions.items() if len(found) == 1}
    if not pure:
        if any(versions.values()):
            raise RecordError(
                "every file holds tokens of several weight versions, so there is no one rollout policy "
                "to compare with; draw a batch without updating the weights in between"
            )
        return None, list(files)
    newest = max(pure.values())
    return newest, [file for file in files if pure.get(file) == newest or not versions[file]]


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

    Prompts are known by their tokens: one that recurs, in a file or in several, is one independent
    draw, whatever its group ids. So are the prompts that one file gives one group id.

    Raises: `RecordError` for a file that is none of ours, files without any sequence, log-probs that
        are not those of the policy that was sampled, or more than one rollout policy;
        `ShapeError` for rollouts without rewards in some files and with rewards in others.
    """
    model.eval()
    parts: list[BatchEvidence] = []
    tokens = 0
    drawn: Drawn | None = None
    for i, file in enumerate(files):
        rollouts = read(file)
        drawn = _same_policy(drawn, rollouts, file)
        rollouts = rollouts.with_(group_ids=_prompts(rollouts))
        for piece in chunks(rollouts, token_budget=token_budget):
            parts.append(_evidence(model, rollouts.select(piece), region, tail_log_ratio_cap))
        tokens += len(rollouts.tokens)
        del rollouts  # before the next file is read
        if parts:
            parts = [BatchEvidence.merge_all(parts)]
            watch(file, Judged(i + 1, tokens, parts[0]))
    if not parts:
        raise RecordError("there are no rollouts in what was given; there is nothing to certify")
    return Judged(len(files), tokens, parts[0])


def _prompts(rollouts: Rollouts) -> Int[Tensor, " b"]:
    """The prompt of each sequence, by the same number in every file: the least key of its group."""
    keys = rollouts.prompt_keys()
    found, group = rollouts.group_ids.unique(return_inverse=True)
    return keys.new_zeros(len(found)).scatter_reduce(0, group, keys, "amin", include_self=False)[group]  # fmt: skip


Drawn = tuple[Provenance, tuple[int, ...]]
"""How rollouts were drawn, and by the weights of which versions."""


def _same_policy(before: Drawn | None, rollouts: Rollouts, file: Path) -> Drawn | None:
    """What the files so far were drawn by; refused if this one was drawn by something else."""
    if not rollouts.num_sequences:
        return before
    provenance = rollouts.provenance
    if provenance.logprobs != "processed":
        raise RecordError(
            f"{file} holds {provenance.logprobs} log-probs, not those of the policy that was sampled; "
            "record processed ones"
        )
    now = (provenance, tuple(rollouts.rollout_version.unique().tolist()))
    if len(now[1]) > 1 or (before is not None and before != now):
        told = (
            "differs from the files before" if len(now[1]) == 1 else "holds several weight versions"
        )
        raise RecordError(
            f"{file} {told} (versions {list(now[1])}, {provenance.sampling}): a certificate compares two "
            "policies, so give rollouts that one policy drew with one sampling"
        )
    return now


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
