"""Certify a policy from stored rollouts: score them, bound the gain, and show the certificate.

One file at a time is in memory, and of each file only `token_budget` padded tokens are scored at
once; what stays is a row of numbers per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from offdrift.certificate import BatchEvidence, Certificate, TrustRegion
from offdrift.certificate.verdict import ONE_LOOK
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


NAMES = {
    "gain": "J(pi) - J(mu), ratios' product cut at 2",
    "surrogate": "surrogate L'",
    "surrogate_masked": "surrogate of accepted L'_masked",
    "rejected_reward": "reward of rejected sequences",
    "acceptance": "accepted sequences",
    "prefix_kl": "KL of accepted prefixes, nat",
    "kl_seq": "KL of sequences, nat",
    "shift": "adaptive sum of mean TV",
}
"""What each estimate is called where a person reads it."""


NOTHING = "–"
"""Shown where nothing bounds a number, or nothing stands behind it."""

NOT_FRESH = "not fresh: the policy learned from these prompts, and none of this covers"

COLORS = {"falsified": "red", "unknown": "yellow", "not falsified": "", "known": "green"}


def certificate_view(proof: Certificate, *, width: int = 100) -> RenderableType:
    """The verdict, the preconditions, the intervals and the guarantees."""
    color = "green" if proof.certified else "yellow"
    return Group(
        Panel(Text(proof.verdict), title="certificate", border_style=color, width=min(width, 110)),
        _region(proof),
        _premises(proof),
        _estimates(proof),
        *([_guarantees(proof)] if proof.guarantees else []),
        *([] if proof.fresh else [Text(NOT_FRESH, style="yellow")]),
        *([] if proof.advice is None else [Text(proof.advice, style="yellow")]),
    )


def number(x: float | None) -> str:
    """Four digits; what nothing bounds is a dash."""
    return NOTHING if x is None or not math.isfinite(x) else f"{x:.4g}"


def _region(proof: Certificate) -> Text:
    limits = [f"T = {proof.region.horizon:,}", f"KL <= {proof.region.delta:g} nat"]
    limits += [f"TV <= {proof.region.eps:g}"] if proof.region.eps is not None else []
    limits += [f"|log ratio| <= {proof.region.tau:g}"] if proof.region.tau is not None else []
    return Text(
        f"trust region: {', '.join(limits)}.  {proof.sequences:,} sequences of {proof.prompts:,} "
        f"prompts, probability of error {proof.alpha:g} ({ONE_LOOK}), {proof.constants} constants",
        style="bold",
    )


def _premises(proof: Certificate) -> Table:
    table = _table("what the batch says of the trust region")
    for name in ("premise", "status", "largest seen", "evidence"):
        table.add_column(name)
    seen = {"kl": proof.delta_seen, "tv": proof.eps_seen}
    for name, status in proof.premises.items():
        low, high = seen[name]
        ends = number(high) if low == high else f"{number(low)} to {number(high)}"
        if proof.grades[name] == "sampled":
            ends = NOTHING
        table.add_row(
            f"{name.upper()} at every context",
            Text(status, style=COLORS[status]),
            ends,
            proof.grades[name],
        )
    if proof.unseen is not None:
        table.add_row(
            "a fresh prompt leaves it",
            "at most",
            f"{number(100 * proof.unseen)}%",
            "Clopper-Pearson",
        )
    if proof.assumes:
        words = f"taken for granted: {'; '.join(sorted(proof.assumes))}"
        words += f"; {proof.refuted:,} sequences contradict it" if proof.refuted else ""
        _below(table, Text(words, style="yellow"))
    return table


def _estimates(proof: Certificate) -> Table:
    table = _table("expectations, and where they surely lie")
    table.add_column("quantity")
    for name in ("mean", "low", "high"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("normal interval*", justify="right")
    absent = proof.unfounded
    for name, e in proof.estimates.items():
        normal = proof.asymptotic.get(name)
        about = "" if normal is None else f"{number(normal.low)} to {number(normal.high)}"
        ends = (None, None, None) if name in absent else (e.mean, e.low, e.high)
        table.add_row(Text(NAMES.get(name, name)), *map(number, ends), Text(about, style="dim"))
    _below(table, Text("* asymptotic, not a guarantee; no verdict uses it", style="dim"))
    return table


def _guarantees(proof: Certificate) -> Table:
    table = _table("guarantees on J(pi) - J(mu): start - error - price")
    table.add_column("guarantee", no_wrap=True)
    for name in ("start", "error", "price", "at least"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("provided")
    best = proof.best
    for g in proof.guarantees:
        gain = proof.gain_of(g)
        cells = [number(proof.estimates[g.surrogate].low), number(g.error), number(g.price)]
        table.add_row(
            g.name + (" ◂" if g is best else ""),
            *cells,
            Text(number(gain), style="bold green" if gain > 0 and proof.fresh else ""),
            Text("; ".join(g.provided) or "nothing further"),
        )
    return table


def _below(table: Table, words: Text) -> None:
    table.caption, table.caption_justify = words, "left"


def _table(title: str) -> Table:
    return Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)  # fmt: skip
