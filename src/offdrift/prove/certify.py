"""Certify a policy from stored rollouts: score them, bound the gain, and show the certificate.

One file at a time is in memory, and at most `token_budget` padded tokens are scored at once. Of each sequence a row
of numbers is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from offdrift.certificate import Certificate, TrustRegion
from offdrift.certificate.batch import BatchEvidence
from offdrift.certificate.prompts import PromptDesign, two_readings
from offdrift.divergence.evidence import Divergence
from offdrift.engines.score import chunks, divergences, old_divergences, rollout_ratio_means, score
from offdrift.errors import RecordError
from offdrift.logprobs import LogProbs
from offdrift.records.provenance import Provenance
from offdrift.records.rollouts import Rollouts
from offdrift.records.store import read, read_clusters, read_drawn_by, read_prompts
from offdrift.stats import Alphas, DriftStats, summarize


@dataclass(frozen=True)
class JudgedBatches:
    """Counts of what was read, and its evidence."""

    files: int
    tokens: int
    evidence: BatchEvidence
    repeated: int = 0
    """Sequences left out, since an earlier file has answers to their prompts."""
    drift: DriftStats | None = None
    """Drift between rollout, old and judged policy; None where no old policy was named."""

    @property
    def alphas(self) -> Alphas:
        """Mismatch and staleness at the states that were met, or what is missing to tell them apart."""
        if self.drift is None:
            return Alphas(
                None, None, "the old policy, the trainer at the weights that drew: name its checkpoint by --old"
            )
        return Alphas.of(summarize(self.drift), grade=self.drift.grade)


def rollout_files(paths: Sequence[Path]) -> list[Path]:
    """The Parquet files among files, folders of files, and arms of a run, in order.

    A file that is named twice is read once: its sequences are no further independent draws.

    Raises: `RecordError` naming a path that holds none.
    """
    files: dict[Path, Path] = {}
    for path in paths:
        folder = path / "rollouts" if (path / "rollouts").is_dir() else path
        here = sorted(folder.glob("*.parquet")) if folder.is_dir() else [folder]
        if not here or not here[0].is_file() or here[0].suffix != ".parquet":
            raise RecordError(
                f"{path} holds no rollouts; give .parquet files, a folder of them, or an arm of a run "
                "(runs/NAME/arms/ARM). Two files of prompts and rewards are compared by `certify A B --fresh`"
            )
        for file in here:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def longest_response(files: Sequence[Path]) -> int:
    """The horizon of the files: the most tokens that their sampling allowed."""
    return max(read_drawn_by(file)[0].sampling.max_tokens for file in files)


def newest_policy(files: Sequence[Path]) -> tuple[int | None, list[Path]]:
    """The newest version among the files' rollout policies, and the files that it alone drew.

    A certificate compares two policies: intervals of rollouts pooled from several policies are not
    valid. A batch that was drawn while weights were updated has no single version.

    Raises: `RecordError` if no file is of one version.
    """
    versions = {file: read_drawn_by(file)[1] for file in files}
    pure = {file: drawn_by[0] for file, drawn_by in versions.items() if len(drawn_by) == 1}
    if not pure:
        if any(versions.values()):
            raise RecordError(
                "every file holds tokens of several weight versions, so there is no one rollout policy "
                "to compare with; draw a batch without updating the weights in between"
            )
        return None, list(files)
    newest = max(pure.values())
    return newest, [file for file in files if pure.get(file) == newest or not versions[file]]


Policy = tuple[Provenance, list[int]]
"""What drew a file: engine and sampling, and the versions of the weights."""


def drawn_by_one(rollouts: Rollouts, file: Path, *, like: Policy | None = None) -> Policy:
    """Return what drew the rollouts of a file.

    Raises: `RecordError` where that is not one policy, not the one that drew the files before, or not a sample of it.
    """
    provenance, versions = rollouts.provenance, rollouts.rollout_version.unique().tolist()
    if provenance.logprobs != "processed":
        raise RecordError(
            f"{file} holds {provenance.logprobs} log-probs, not those of the policy that was sampled; "
            "record processed ones"
        )
    if provenance.selected:
        raise RecordError(
            f"{file}: prompts or group sizes were chosen by the rewards of the responses ([draws] in the "
            "recipe), or by how long they took, as in an asynchronous run that takes first what has finished "
            "first; so they are no independent sample. Draw rollouts without either"
        )
    if len(versions) > 1 or like not in (None, (provenance, versions)):
        defect = "holds several weight versions" if len(versions) > 1 else "differs from the files before"
        raise RecordError(
            f"{file} {defect} (versions {versions}, {provenance.sampling}): a certificate compares two "
            "policies, so give rollouts that one policy drew with one sampling"
        )
    return provenance, versions


@torch.no_grad()
def judge(
    files: Sequence[Path],
    model: nn.Module,
    *,
    region: TrustRegion,
    token_budget: int = 4096,
    tail_log_ratio_cap: float | None = None,
    arriving: bool = False,
    old: nn.Module | None = None,
    prompts: PromptDesign = "listed",
    cluster: str = "",
    watch: Callable[[Path, JudgedBatches], None] = lambda path, so_far: None,
) -> JudgedBatches:
    """The evidence about a policy in stored rollouts, sequences in the order of the files and in theirs.

    Args:
        files: rollouts, with the evidence that their engine recorded.
        model: the current policy, a causal language model.
        region: the trust region to certify, chosen before looking at the rollouts.
        token_budget: padded tokens per forward pass.
        tail_log_ratio_cap: assumed limit of |log-ratio| in the tail of top-k evidence, nats.
        arriving: the files are what has arrived so far, and more will: a prompt is judged by the first file that
            answers it, and its answers in later files are left out, so that what was once judged never changes.
        old: the trainer at the weights that drew the rollouts: what the drift is split by, see `Judged.alphas`.
        watch: called after each file, once there are sequences.

        prompts: what is one independent draw. "listed": a prompt, known by its tokens; one that recurs, in a file or
            in several, is one draw, whatever its group ids. "drawn": a group of a file, whatever its prompt, so that
            nothing is left out where more files arrive. Either way sequences with one group id in a file are one draw.
            "clustered": what has one value of the column `cluster`, in whatever file.
        cluster: column of the files that names what prompts share, for "clustered"; `check_clusters` checks it.

    Raises: `RecordError` for a file that is none of ours, files without any sequence, log-probs that
        are not those of the policy that was sampled, or more than one rollout policy;
        `ShapeError` for rollouts without rewards in some files and with rewards in others.
    """
    for network in (model, old):
        if network is not None:
            network.eval()
    drift: list[DriftStats] = []
    so_far: list[BatchEvidence] = []
    answered = torch.zeros(0, dtype=torch.int64)
    tokens = repeated = groups = 0
    policy: Policy | None = None
    for i, file in enumerate(files):
        rollouts = read(file)
        if rollouts.num_sequences:
            policy = drawn_by_one(rollouts, file, like=policy)
        if prompts == "drawn":
            ids, groups = _numbered(rollouts.group_ids, groups)
        elif prompts == "clustered":
            ids = read_clusters(file, cluster)
        else:
            ids = _least_keys(rollouts.prompt_keys(), rollouts.group_ids)
        rollouts = rollouts.with_(group_ids=ids)
        if arriving and prompts != "drawn":
            new = ~torch.isin(rollouts.group_ids, answered)
            answered = torch.cat([answered, rollouts.group_ids.unique()])
            repeated += int((~new).sum())
            rollouts = rollouts.select(new.nonzero().squeeze(-1))
        parts: list[BatchEvidence] = []
        pieces = [*chunks(rollouts, token_budget=token_budget)]
        for piece in pieces:
            part = rollouts.select(piece)
            scores = score(model, part, temperature=part.provenance.sampling.temperature)
            device = scores.logp.device
            cuts, ids = part.cu_seqlens.to(device), part.group_ids.to(device)
            logprobs = LogProbs.pack(
                part.logp_rollout.to(device),
                scores.logp,
                segments=replace(part.segments, cu_seqlens=cuts, group_ids=ids),
            )
            exact = divergences(part, scores.logits, tail_log_ratio_cap=tail_log_ratio_cap)
            if old is not None:
                drift = [DriftStats.merge_all([*drift, _three_policies(old, part, logprobs, scores.logits, exact)])]
            rewards = None if part.rewards is None else part.rewards.to(device)
            means = rollout_ratio_means(part, scores.logits)
            parts.append(BatchEvidence.of(logprobs, rewards, region=region, divergences=exact, ratio_means=means))
        tokens += len(rollouts.tokens)
        del rollouts  # before the next file is read
        if parts:
            judged = BatchEvidence.merge_all(parts)
            order = torch.cat(pieces).argsort().to(judged.columns.device)  # pieces are cut by length
            assert judged.group_ids is not None
            judged = replace(judged, columns=judged.columns[order], group_ids=judged.group_ids[order])
            so_far = [BatchEvidence.merge_all([*so_far, judged])]
        if so_far:
            watch(file, JudgedBatches(i + 1, tokens, so_far[0], repeated, next(iter(drift), None)))
    if not so_far:
        raise RecordError("there are no rollouts in what was given; there is nothing to certify")
    return JudgedBatches(len(files), tokens, so_far[0], repeated, next(iter(drift), None))


def check_design(files: Sequence[Path]) -> None:
    """Raise `RecordError`, with both readings, if groups of answers in the files share a prompt."""
    draws, keys = 0, torch.zeros(0, dtype=torch.int64)
    for file in files:
        prompts, ids = read_prompts(file)
        _, draws = _numbered(ids, draws)
        keys = torch.cat([keys, _least_keys(prompts, ids)]).unique()
    if draws > len(keys):
        raise RecordError(two_readings(draws, len(keys)))


def check_clusters(files: Sequence[Path], column: str) -> None:
    """Raise `RecordError` unless the prompts of each group, and equal prompts of all files, are of one cluster.

    Args:
        files: rollouts.
        column: of the files, naming the cluster of each sequence's prompt.
    """
    seen: dict[int, int] = {}
    for file in files:
        (prompts, ids), clusters = read_prompts(file), read_clusters(file, column)
        for prompt, of in zip(prompts.tolist(), clusters.tolist(), strict=True):
            if seen.setdefault(prompt, of) != of:
                raise RecordError(
                    f"{file}: answers to one prompt are of several clusters ({column}), which are then no independent "
                    "draws; give clusters that share no prompt one name"
                )
        pairs = torch.stack([ids, clusters]).unique(dim=1)
        if pairs.shape[1] > len(ids.unique()):
            raise RecordError(f"{file}: a group of answers is of several clusters ({column}); a group is one draw")


def _least_keys(keys: Tensor, group_ids: Tensor) -> Tensor:
    """The least key of the prompts of each sequence's group: the same number in every file."""
    groups, group = group_ids.unique(return_inverse=True)
    return keys.new_zeros(len(groups)).scatter_reduce(0, group, keys, "amin", include_self=False)[group]


def _numbered(group_ids: Tensor, before: int) -> tuple[Tensor, int]:
    """A file's groups, numbered on from those of the files before, and how many there are now."""
    groups, group = group_ids.unique(return_inverse=True)
    return group + before, before + len(groups)


def _three_policies(
    old: nn.Module, part: Rollouts, logprobs: LogProbs, logits: Tensor, exact: dict[str, Divergence]
) -> DriftStats:
    """Drift of a piece between the rollout policy, the old one and the judged one, with whole distributions."""
    before = score(old, part, temperature=part.provenance.sampling.temperature)
    as_old = {
        name.replace("_current", "_old"): replace(d, name=name.replace("_current", "_old"))
        for name, d in divergences(part, before.logits).items()
    }
    three = LogProbs.pack(logprobs.logp_rollout, logprobs.logp, before.logp, segments=logprobs.segments)
    every = exact | as_old | old_divergences(before.logits, logits)
    return DriftStats.of(three, divergences=every).cpu()


NAMES = {
    "gain": "J(pi) - J(mu) by whole ratios",
    "surrogate": "surrogate L'",
    "surrogate_masked": "surrogate of accepted L'_masked",
    "rejected_reward": "reward of rejected sequences",
    "mean_ratio": "ratio of sequences, at most 1",
    "acceptance": "accepted sequences",
    "prefix_kl": "KL of accepted prefixes, nat",
    "prefix_error": "L'_masked overstates by, at most",
    "prefix_shift": "adaptive sum of accepted prefixes",
    "kl_seq": "KL of sequences, nat",
    "shift": "adaptive sum of mean TV",
}
"""Names of the estimates on the screen."""


NOTHING = "–"
"""Shown for numbers without a bound or without evidence."""
NOT_FRESH = "not fresh: the policy was trained on these prompts, so no interval above is valid"
REFUTED = "the record is refuted: its log-probs are not those of the policy that drew, so no interval above is valid"
COLORS = {"falsified": "red", "unknown": "yellow", "not falsified": "", "known": "green"}


def certificate_view(proof: Certificate, *, width: int = 100, alphas: Alphas | None = None) -> RenderableType:
    """The verdict, the preconditions, the intervals, the guarantees, and the drift split in two."""
    color = "green" if proof.certified else "yellow"
    region = proof.region
    limits = [f"T = {region.horizon:,}"]
    limits += [f"KL <= {region.delta:g} nat"] if region.delta < math.inf else []
    limits += [f"TV <= {region.eps:g}"] if region.eps is not None else []
    limits += [f"|log ratio| <= {region.tau:g}"] if region.tau is not None else []
    summary = (
        f"trust region: {', '.join(limits)}.  {proof.sequences:,} sequences of {proof.prompts:,} "
        f"prompts, probability of error {proof.alpha_total:g} ({proof.holds_for}), {proof.constants} constants"
    )
    return Group(
        Panel(Text(proof.verdict), title="certificate", border_style=color, width=min(width, 110)),
        Text(summary, style="bold"),
        Text(proof.averages_over, style="bold"),
        premises_table(proof),
        estimates_table(proof),
        *([guarantees_table(proof)] if proof.guarantees and not proof.record_refuted else []),
        *([Text(REFUTED, style="red")] if proof.record_refuted else []),
        *([] if proof.fresh else [Text(NOT_FRESH, style="yellow")]),
        *([] if proof.advice is None else [Text(proof.advice, style="yellow")]),
        *([] if alphas is None else alphas_view(alphas)),
    )


def alphas_view(alphas: Alphas) -> list[RenderableType]:
    """Mismatch and staleness, and where to invest."""
    table = _table("mismatch and staleness at the states that were met")
    table.add_column("distance")
    for name in ("mean", "95 %", "largest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("evidence")
    each = [a for a in (alphas.mismatch, alphas.staleness) if a is not None]
    for a in each:
        high = number(a.high)
        largest = f"≥ {number(a.low)}" if a.high is None else high if a.low == a.high else f"{number(a.low)} to {high}"
        table.add_row(a.which, number(a.mean), number(a.p95), largest, a.grade)
    return [*([table] if each else []), Text(alphas.sentence, style="" if each else "dim")]


def number(x: float | None) -> str:
    """Four digits; a dash for None and infinite numbers."""
    return NOTHING if x is None or not math.isfinite(x) else f"{x:.4g}"


def premises_table(proof: Certificate) -> Table:
    """Status of each premise of the trust region, and the assumptions of the evidence."""
    table = _table("premises of the trust region in this batch")
    for name in ("premise", "status", "largest measured", "evidence"):
        table.add_column(name)
    largest = {"kl": proof.delta_seen, "tv": proof.eps_seen}
    for name, status in proof.premises.items():
        low, high = largest[name]
        ends = number(high) if low == high else f"{number(low)} to {number(high)}"
        if proof.grades[name] == "sampled":
            ends = NOTHING
        table.add_row(f"{name.upper()} at every context", Text(status, style=COLORS[status]), ends, proof.grades[name])
    if proof.unseen is not None:
        share = f"{number(100 * proof.unseen)}%"
        table.add_row("a fresh prompt leaves it", "at most", share, "Clopper-Pearson")
    if proof.assumes:
        words = f"assumed: {'; '.join(sorted(proof.assumes))}"
        words += f"; {proof.refuted:,} sequences contradict it" if proof.refuted else ""
        table.caption = Text(words, style="yellow")
    return table


def estimates_table(proof: Certificate) -> Table:
    """Mean and confidence interval of each estimate."""
    table = _table("expectations and their confidence intervals")
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
    table.caption = Text("* asymptotic, not a guarantee; no verdict uses it", style="dim")
    return table


def guarantees_table(proof: Certificate) -> Table:
    """Lower bounds on the gain, with their parts and conditions."""
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


def _table(title: str) -> Table:
    return Table(
        title=Text(title, style="bold"),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
