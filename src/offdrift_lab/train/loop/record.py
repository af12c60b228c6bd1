"""Records of an update (metrics, certificate, findings, samples, token log), and an arm's row of the table."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from offdrift.certificate.certify import certify
from offdrift.certificate.confidence import Looks
from offdrift.divergence.evidence import Grade
from offdrift.methods import Method
from offdrift.methods.load import displayed
from offdrift.objectives.turns import TurnNormalized
from offdrift.records.batch import Logged
from offdrift.records.recorder import write_log
from offdrift.records.rollouts import Rollouts
from offdrift.records.schema import OLD_STATUS
from offdrift.show.anchors import anchor
from offdrift.stats import Alphas
from offdrift.stats.metrics import summarize
from offdrift_lab.train.loop.arm import Arm
from offdrift_lab.train.loop.batch import Batch
from offdrift_lab.train.loop.step import TokenView, Update
from offdrift_lab.train.report.stored import summary_numbers

Row = Mapping[str, Any]

SELECTED = (
    "no certificate: prompts or group sizes were chosen by the rewards of the responses (draws), so they are no "
    "independent sample"
)

FIRST_FINISHED = (
    "no certificate: the schedule takes groups as they finish, or drops old ones, so that which ones a batch has "
    "depends on how long their responses took, and they are no independent sample; "
    'consumption.order = "submitted" makes them one'
)

KEPT = 4
"""Sequences per sampled update that go to the report."""


def record_update(
    arm: Arm,
    update: Update,
    *,
    batch: int,
    updates_before: int,
    epoch: int,
    independent: bool,
    learning_rate: float,
    sampled: bool,
    more: Row | None = None,
) -> dict[str, Any]:
    """Store and show an update that the arm has just taken.

    Args:
        batch: index of the rollout batch.
        updates_before: earlier updates on the same batch.
        epoch: earlier passes over the same batch.
        independent: whether the policy knew nothing of the batch when it arrived; it does where a buffer gave it again.
        learning_rate: of the step, before the method's own scale.
        sampled: whether some sequences go to the report.
        more: of the source: what a schedule did since the last update.
    """
    run, now, rollouts = arm.run, time.perf_counter(), update.batch.rollouts
    seconds, arm.last_time = now - arm.last_time, now
    assert update.evidence is not None
    # After a batch's first update the policy has learned from its prompts: no certificate covers it.
    fresh = independent and updates_before == 0
    # A batch is a look. Its number follows from the batch's, so that a resumed run goes on counting where its
    # checkpoint stands.
    settings, looks = run.recipe.certificate, Looks()
    if settings.looks == "spend":
        looks = Looks(at=batch + 1, of=len(run.recipe.arms), series="this run")
    proof = certify(
        update.evidence,
        reward_range=run.recipe.reward_range,
        alpha=settings.alpha,
        looks=looks,
        fresh=fresh,
        prompts="drawn",  # a batch's prompts are drawn afresh, and a group is one of them
    )
    verdict = proof.verdict
    if rollouts.provenance.selected:
        verdict = SELECTED if run.recipe.pipeline is None else FIRST_FINISHED
    metrics = summarize(update.stats)
    sums = update.stats.to_host() if rollouts.components else {}
    metrics |= {f"component/{name}": sums[f"component/{name}"] / sums["b"] for name in rollouts.components or ()}
    statuses = (name for name in reversed(OLD_STATUS) if metrics.get(f"old/{name}_frac"))
    row = {
        "update": arm.version,
        "batch": batch,
        "batch/updates_before": updates_before,
        "batch/epoch": epoch,
        "divergence/grade": update.stats.grade,
        **metrics,
        "optim/lr": learning_rate * metrics["optim/lr_scale"],
        "old/status": next(statuses, None),
        **proof.as_metrics(),
        "certificate/fresh": fresh,
        "certificate/holds_for": proof.holds_for,
        "certificate/verdict": verdict,
        "throughput/seconds": seconds,
        "throughput/tokens_per_s": metrics["batch/tokens"] / seconds,
        **(more or {}),
    }
    if run.recipe.after_surge() is not run.recipe:
        row |= {"optim/method": displayed(arm.recipe.arms[arm.name].method), "optim/method_switched": arm.switched}
    if run.accelerator.is_main_process:
        arm.files.append("metrics", row)
        if sampled and update.tokens is not None:
            for sample in samples(rollouts, update.tokens, arm.version, run.tokenizer):
                arm.files.append("samples", sample if arm.method.correction.gates else {**sample, "accepted": None})
    run.accelerator.log(_numbers(row), step=arm.version)
    arm.report("update", metrics=row)
    for finding in arm.diagnosis.update(row):
        fields = finding.as_dict()
        if run.accelerator.is_main_process:
            fields["page"] = f"report.html#{anchor(f'finding-{arm.name}', finding.rule)}"
            arm.files.append("findings", {"update": arm.version, **fields})
        where = f"{arm.name}: update {arm.version}, {finding.severity}"
        arm.report("finding", f"{where}: {finding.symptom} {finding.fix}", fields)
    return row


def samples(
    rollouts: Rollouts, view: TokenView, version: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Lines of `samples.jsonl`: the sequence with the worst token, and some spread over the batch's prompts.

    There are none if texts or rewards are unknown.
    """
    if rollouts.prompts is None or rollouts.rewards is None:
        return []
    kl, tv = (view.divergence(f"{name}_rollout_current") for name in ("kl", "tv"))
    worst = int(rollouts.segments.max(kl.nan_to_num(0.0)).argmax())
    spread = torch.linspace(0, rollouts.num_sequences - 1, KEPT - 1).long().tolist()
    cuts, turns = rollouts.cu_seqlens.tolist(), rollouts.turns
    lines = []
    for i in dict.fromkeys([worst, *spread]):
        s = slice(cuts[i], cuts[i + 1])
        lines.append(
            {
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
        )
        if turns is not None:
            own = slice(*turns.context_cu_seqlens[i : i + 2].tolist())
            before, context = turns.context_ids[own], turns.context_tokens[own]
            # What was read between turns, with the place of the token that follows.
            lines[-1]["context"] = [
                [int((turns.ids[s] < turn).sum()), tokenizer.decode(context[before == turn].tolist())]
                for turn in before.unique().tolist()
            ]
    return lines


@dataclass
class TokenLog:
    """Tokens of a batch as the trainer first used them, in the schema that `offdrift audit` reads.

    Each sequence is logged once, with the update that first trained on it and the log-probs that the
    policy gave it just before; of several epochs, with those that it gave it before the last one, too. Everything was
    computed by the steps anyway: no forward pass is made for it.
    """

    of_old: bool = True
    """Whether divergences of the old from the rollout policy are kept: every batch of a run has them, or none."""
    steps: list[tuple[Tensor, TokenView, int]] = field(default_factory=list)
    """Of each step: its sequences, their tokens, and the version of the weights that it was taken from."""
    again: list[tuple[Tensor, TokenView]] = field(default_factory=list)
    """Of each step of the last epoch, if there are several: its sequences and their tokens."""

    def add(self, sequences: Tensor | None, update: Update, version: int, *, logged: bool, last: bool) -> None:
        """Note a step on some of the batch's sequences, or all, as the first on them, the last, or neither."""
        if update.tokens is None:
            return
        if sequences is None:
            sequences = torch.arange(update.batch.rollouts.num_sequences)
        if logged:
            self.steps.append((sequences, update.tokens, version))
        if last:
            self.again.append((sequences, update.tokens))

    def write(self, batch: Batch, file: Path, *, replayed: tuple[str, ...] = ()) -> None:
        """Write the batch's file, sequences in the order in which they were used.

        Args:
            replayed: see `Provenance.replayed`.

        Raises: `RecordError` if it cannot be written.
        """
        sequences, views, versions = zip(*self.steps, strict=True)
        order, counts = torch.cat(sequences), torch.tensor([len(s) for s in sequences])
        whole, old = batch.rollouts, batch.old
        used, rows = whole.with_(evidence=None).select(order), whole.segments.rows(order)
        version, logp = torch.tensor(versions).repeat_interleave(counts), torch.cat([v.logp for v in views])
        names = [n for n in views[0].lower if self.of_old or not n.endswith("rollout_old")]
        names = [n for n in names if all(n in v.exact for v in views)]
        worst_status = None  # of each sequence, its worst token's
        if batch.old_status is not None:
            worst_status = used.segments.max(batch.old_status[rows].double()).long()
        log = Logged.of(
            used,
            recorded=used.provenance.recorded,
            replayed=replayed,
            step=version + 1,  # metrics call an update by the number of steps taken after it
            logp_old=logp if batch.old_is_current else None if old is None else old.logp[rows],
            logp=logp,
            logp_ref=None if batch.logp_ref is None else batch.logp_ref[rows],
            advantages=batch.advantages[rows],
            rewards=used.rewards,
            rollout_version=used.rollout_version,
            logp_last=self._last(batch, rows),
            version=version,
            updates_before=version - min(versions),
            entropy=torch.cat([v.entropy for v in views]),
            divergences={name: torch.cat([v.lower[name] for v in views]) for name in names},
            old_status=worst_status,
            selected=torch.ones(used.num_sequences).long() if used.provenance.selected else None,
            prompts=used.prompts,
            completions=used.completions,
        )
        write_log(log, file)

    def _last(self, batch: Batch, rows: Tensor) -> Tensor | None:
        """The log-probs of the last epoch, at the given tokens of the batch; None if there was one epoch."""
        if not self.again:
            return None
        sequences, views = zip(*self.again, strict=True)
        logp = torch.cat([v.logp for v in views])
        of_batch = torch.empty_like(logp)
        of_batch[batch.rollouts.segments.rows(torch.cat(sequences))] = logp
        return of_batch[rows]


def summarize_arm(
    name: str,
    row: Method,
    method_name: str,
    metrics: Sequence[Row],
    evals: Sequence[Row],
    *,
    seconds: float,
    findings: Sequence[Row] = (),
    old_policy: str | None = None,
) -> dict[str, Any]:
    """An arm's row of the final table, from the rows that the arm stored; None for what was not measured.

    Args:
        old_policy: source of its old log-probs, `old_policy.from` of the recipe.
    """
    description = row.describe()
    if statuses := _recorded(metrics, "old/status"):
        description += f"; old log-probs {max(statuses, key=OLD_STATUS.index)} ({old_policy})"
    return {
        "arm": name,
        "method": method_name,
        "description": description,
        "updates": len(metrics),
        **summary_numbers(metrics, evals),
        "eval_prompts": evals[-1]["prompts"] if evals else None,
        "tokens_per_s": sum(m["batch/tokens"] for m in metrics) / seconds if seconds > 0 else None,
        "seconds": seconds,
        "grade": metrics[-1]["divergence/grade"] if metrics else None,
        "findings": list(findings),
        "notes": [*_notes(row, metrics)],
    }


def _notes(row: Method, metrics: Sequence[Row]) -> Iterator[str]:
    """Remarks for a reader of the row: parts without effect, weak evidence."""
    yield from _without_gradient(metrics)
    if undone := sum(map(bool, _recorded(metrics, "optim/undone"))):
        yield f"{undone} of {len(metrics)} steps failed their test and were undone (optim.accept)"
    yield from _without_effect(row, metrics)
    shares, kl = _recorded(metrics, "fusion/alpha_mean"), _recorded(metrics, "fusion/kl_mean")
    if any(shares):
        yield (
            f"a teacher's logits were mixed in, with a share of {shares[0]:.2g} at first and {shares[-1]:.2g} at last: "
            f"KL(mixture || policy) of a token was {kl[0]:.2g} and {kl[-1]:.2g} nat, which the drift contains"
        )
    filled = _recorded(metrics, "draws/filled_frac")
    if any(filled):
        yield (
            f"rounds of draws ran out in {sum(x > 0 for x in filled)} of {len(filled)} batches: {max(filled):.0%} of a "
            "batch's groups were filled in without a spread of rewards; the task is too easy or too hard for the model"
        )
    turns = max(_recorded(metrics, "response/turns_mean"), default=1)
    if metrics and turns == 1:
        for part in (row.objective, *row.correction.weights):
            if str(getattr(part, "unit", "")).startswith("turn") or isinstance(part, TurnNormalized):
                yield f"every response was one turn: what is taken over turns was of whole responses ({part.formula})"
    lag = max(map(int, _recorded(metrics, "old/version_lag")), default=0)
    if any(_recorded(metrics, "old/stale_frac")):
        yield (
            f"old log-probs are stale: taken up to {lag} updates after the weights that sampled, so the "
            'mismatch ratio contains staleness; old_policy.from = "sampling" takes them at those weights'
        )
    if any(_recorded(metrics, "old/approximated_frac")):
        yield "old log-probs are approximated: averaged or interpolated policies, not the one that sampled"
    if any(_recorded(metrics, "old/missing_frac")):
        yield "old log-probs are missing: the rollout policy stands in for the old one (bypass)"
    alphas = Alphas.of(_over_updates(metrics))
    if alphas.invest is not None:
        yield alphas.sentence
    if any(m.get("divergence/grade") in ("interval", "capped interval") for m in metrics):
        yield "divergences are lower ends of certified intervals (top-k evidence)"


def _without_gradient(metrics: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence on steps without a gradient: their number, the reason, and those that moved the weights."""
    empty = [
        i
        for i, m in enumerate(metrics)
        if m.get("optim/empty") and not m.get("optim/step_skipped") and m.get("optim/lr_scale", 1.0) > 0
    ]
    if not empty:
        return
    sentence = f"the gradient was 0 in {len(empty)} of {len(metrics)} updates"
    if all(metrics[i].get("groups/flat_frac") == 1 for i in empty):
        sentence += ", as all responses to a prompt earned the same: the task is too easy or too hard for the model"
    earlier = next((i for i, m in enumerate(metrics) if not m.get("optim/empty")), len(metrics))
    if moved := sum(i > earlier for i in empty):
        sentence += f"; in {moved} of them AdamW moved the weights all the same, by its mean of earlier gradients: set "
        sentence += "optim.skip_empty = 'clear' to skip such steps"
    yield sentence


def _without_effect(row: Method, metrics: Sequence[Row]) -> Iterator[str]:
    """Gates, weights and clips that changed no token of the run, and the ratio that gave them no cause."""
    weights = row.correction.weights
    parts: list[tuple[Any, str, str]] = [
        (gate, f"gate/{i}/drop_frac_token", f"gate {i} never rejected a token")
        for i, gate in enumerate(row.correction.gates)
    ]
    capped = [w for w in weights if getattr(w, "cap", None) is not None]
    parts += [(w, "weight/cap_frac", "no weight ever met its limits") for w in capped]
    parts += [(w, "weight/changed_frac", "no weight ever differed from 1") for w in weights]
    parts.append((row.objective, "objective/clip_frac_active", "the objective's clip never changed a token"))
    reported: set[int] = set()
    for part, key, sentence in parts:
        shares = _recorded(metrics, key)
        if not shares or any(shares) or id(part) in reported:
            continue
        reported.add(id(part))
        on = getattr(part, "on", None)
        largest = max(_recorded(metrics, f"{on}/abs_log_ratio_max"), default=None)
        if largest == 0:
            sentence += f": the {on} ratio was 1 at every token, so nothing was corrected, and the arm would have "
            sentence += "gone the same way without it"
        elif largest is not None:
            sentence += f"; the largest |log {on} ratio| was {largest:.2g} nat"
        yield f"{sentence} ({part.formula})"


def _over_updates(metrics: Sequence[Row]) -> dict[str, Any]:
    """Numbers that every update has: of maxima and quantiles the largest, of others the mean; the weakest grade.

    Some updates alone, such as those right after a synchronization, would not stand for the run.
    """
    names = {name for m in metrics for name, x in m.items() if isinstance(x, (int, float))}
    row: dict[str, Any] = {}
    for name in names:
        values = [x for x in _recorded(metrics, name) if math.isfinite(x)]
        if len(values) == len(metrics):
            row[name] = max(values) if name.endswith(("_max", "_max_high", "_p95")) else sum(values) / len(values)
    grades = _recorded(metrics, "divergence/grade")
    return row | ({"divergence/grade": str(Grade.weakest(grades))} if grades else {})


def _recorded(metrics: Sequence[Row], key: str) -> list[Any]:
    return [m[key] for m in metrics if m.get(key) is not None]


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return what trackers get of a row; MLflow stores `a/b` in a folder `a`, beside which no metric `a` can be."""
    return {"batch/number" if k == "batch" else k: v for k, v in row.items() if isinstance(v, (int, float))}
