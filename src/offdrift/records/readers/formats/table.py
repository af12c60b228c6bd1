"""Every kind of log that is known, and how one is recognized.

A row says what a framework calls the fields of a log. Where more must be done, it names functions of `translate`, which
is imported when such a log is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from offdrift.records.schema import COLUMNS, DIVERGENCES, LOGPS

PER_ROW = tuple(name for name, f in COLUMNS.items() if f.per == "sequence")
"""Fields that may be mapped whatever the log: they need no alignment with tokens."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A kind of log.

    With `adapt`, each row (of JSON, of a payload) is translated by that function. Without, rows are of the plain
    schema, under the names in `columns` where those differ.
    """

    format: str
    framework: str
    what: str
    """What the log is, after "found"."""
    because: str
    """What it was recognized by."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The log's name of each field."""
    keys: frozenset[str] = frozenset()
    """Names that rows of this log have; without any, it is recognized by its header or payload."""
    lacks: frozenset[str] = frozenset()
    """Names that rows of this log do not have."""
    adapt: str = ""
    """Function that makes one row of the plain schema, or several, from a row."""
    amend: str = ""
    """Function of a row and its translation: adds what else the row tells. Used without `adapt`."""
    distinct: str = ""
    """Function of files and the bytes that each may take: the files that hold every sequence once."""
    step_in_name: str = r"(?:^|[/_.-])step[_-]?(\d+)"
    """Where a file's path tells the step of rows that do not."""
    step_in_row: str = ""
    """Where a row tells a step that counts only if the path tells none."""
    note: str = ""
    """What to know about it, in a sentence."""

    def step(self, file: str) -> int | None:
        """The step that a file's path tells."""
        steps = re.findall(self.step_in_name, file)
        # The innermost folder or the name itself; a number that fits no tensor is none.
        return int(steps[-1]) if steps and len(steps[-1]) < 19 else None

    def resolve(self, names: Iterable[str], mapped: Mapping[str, str]) -> dict[str, str]:
        """Column by field: as mapped, or as this source calls it, or by a known name."""
        there = set(names)
        columns = {}
        for name, f in COLUMNS.items():
            own = next((n for n in (self.columns.get(name), name, *f.spellings) if n in there), None)
            columns[name] = mapped.get(name, own)
        return {name: column for name, column in columns.items() if column}


def function(name: str) -> Callable[..., Any]:
    """A function of `translate` that the table names."""
    return getattr(import_module(f"{__package__}.translate"), name)


PAYLOADS = {".pt": "slime", ".pkl": "skyrl"}
"""By suffix, what reads a file whose kind is told by its content."""

ENGINE_ALONE = "it holds the engine's log-probs, none of the trainer's"
SLIME_TRAIN_COLUMNS = {
    "logp_rollout": "rollout_log_probs",
    "logp_old": "log_probs",
    "logp_ref": "ref_log_probs",
    "advantages": "advantages",
    "mask": "loss_masks",
    "entropy": "entropy",
}
SLIME_ROLLOUT_COLUMNS = {"logp_rollout": "rollout_log_probs", "mask": "loss_mask"}
VERL_COLUMNS = {"prompt": "input", "completion": "output", "reward": "score"}

(
    PRIME_RL, NEMO_RL, SLIME_TRAIN, MILES_TRAIN, SKYRL, OWN, OWN_ROLLOUTS, PLAIN, SLIME_ROLLOUT, MILES_ROLLOUT,
    MILES_COLUMNS, PRIME_RL_TRACES, OPEN_INSTRUCT, TITAN_RL, TRL, AREAL, VERL, VERL_VALIDATION,
) = SOURCES = (
    Source(
        format="prime-rl", framework="prime-rl", what="prime-rl's token exports",
        because="the keys inference_logprobs and trainer_logprobs",
        keys=frozenset({"inference_logprobs", "trainer_logprobs", "loss_mask"}),
        columns={
            "logp_rollout": "inference_logprobs", "logp": "trainer_logprobs", "tokens": "token_ids",
            "mask": "loss_mask", "advantages": "advantages", "entropy": "entropy", "step": "step",
        },
        adapt="prime_rl", step_in_name=r"(?:^|/)step_(\d+)/",
    ),
    Source(
        format="nemo-rl", framework="nemo-rl", what="NeMo-RL's training data",
        because="the keys generation_logprobs and prev_logprobs",
        keys=frozenset({"generation_logprobs", "prev_logprobs", "input_lengths"}),
        columns={
            "logp_rollout": "generation_logprobs", "logp_old": "prev_logprobs", "tokens": "token_ids",
            "mask": "token_loss_mask", "advantages": "advantages", "reward": "rewards", "completion": "content",
        },
        adapt="nemo_rl", step_in_name=r"train_data_step(\d+)\.jsonl",
    ),
    Source(
        format="slime-train", framework="slime", what="slime's train dumps", because="the samples in the .pt files",
        columns=SLIME_TRAIN_COLUMNS,
    ),
    Source(
        format="miles-train", framework="miles", what="miles' train dumps",
        because="the rollout_data in the .pt files", columns=SLIME_TRAIN_COLUMNS, distinct="distinct",
    ),
    Source(
        format="skyrl", framework="skyrl", what="SkyRL's dumped training batches", because="the class in the pickles",
        columns={
            "logp_rollout": "rollout_logprobs", "logp_old": "action_log_probs", "logp_ref": "base_action_log_probs",
            "advantages": "advantages", "mask": "loss_mask",
        },
        step_in_name=r"global_step_(\d+)_",
    ),
    Source(
        format="plain", framework="offdrift", what="offdrift log", because="its header",
    ),
    Source(
        format="offdrift-rollouts", framework="offdrift", what="offdrift rollout records",
        because="their header", columns={"truncated": "finish"}, step_in_name=r"(?:^|[/_.-])(\d+)\.parquet",
        note="they hold only the engine's log-probs; the log beside them also holds the trainer's",
    ),
    Source(
        format="plain", framework="plain", what="plain schema", because="its column names",
    ),
    Source(
        format="slime-rollout", framework="slime", what="slime's rollout dumps",
        because="the samples in the .pt files", columns=SLIME_ROLLOUT_COLUMNS, note=ENGINE_ALONE,
    ),
    Source(
        format="miles-rollout", framework="miles", what="miles' rollout dumps",
        because="the samples in the .pt files", columns=SLIME_ROLLOUT_COLUMNS, note=ENGINE_ALONE,
    ),
    Source(
        format="miles-columns", framework="miles", what="miles' dashboard columns",
        because="the columns sample_index, total_length and rollout_log_probs",
        keys=frozenset({"sample_index", "total_length", "tokens", "rollout_log_probs"}),
        columns={**SLIME_ROLLOUT_COLUMNS, "tokens": "tokens"}, adapt="miles_columns",
        step_in_name=r"rollout_(\d+)\.parquet", note=ENGINE_ALONE,
    ),
    Source(
        format="prime-rl-traces", framework="prime-rl", what="prime-rl's episodes",
        because="the keys env, task and traces", keys=frozenset({"env", "task", "ok", "traces"}),
        columns={
            "logp_rollout": "logprobs", "advantages": "advantages", "logp_ref": "reference_logprobs",
            "logp": "trainer_logprobs", "entropy": "entropies", "tokens": "token_ids", "mask": "mask",
        },
        adapt="prime_rl_episode", step_in_name=r"(?:^|/)step_(\d+)/", step_in_row="run.work.step",
        note=f"{ENGINE_ALONE}, unless the annotations that it writes since September 2026 were folded in; "
        "trainer.enable_token_export wrote both until then, and record= of offdrift's loss does",
    ),
    Source(
        format="open-instruct", framework="open-instruct", what="open-instruct's rollout traces",
        because="the keys prompt_tokens, response_tokens and finish_reason",
        keys=frozenset({"prompt_tokens", "response_tokens", "finish_reason"}),
        columns={
            "logp_rollout": "logprobs", "tokens": "response_tokens", "advantages": "advantage",
            "group_id": "prompt_idx", "truncated": "finish_reason",
        },
        amend="open_instruct", note=ENGINE_ALONE,
    ),
    Source(
        format="titan-rl", framework="titan-rl", what="TitanRL's rollout samples",
        because="the keys is_validation, rollout_id and turns",
        keys=frozenset({"is_validation", "group_id", "rollout_id", "turns"}), adapt="titan_rl",
        note="they hold what its filter kept: by default the extreme rewards of a group, and neither tokens nor "
        f"log-probs without log_tensors and log_logprobs; {ENGINE_ALONE}",
    ),
    Source(
        format="trl", framework="trl", what="TRL's completions",
        because="the columns step, prompt, completion and advantage",
        keys=frozenset({"step", "prompt", "completion", "advantage"}), columns={"advantages": "advantage"},
        step_in_name=r"completions_(\d+)\.parquet",
        note="it holds texts, rewards and advantages; log-probs only where log_extra added them",
    ),
    Source(
        format="areal", framework="areal", what="AReaL's trajectory dump",
        because="the keys task_id, head_version and tail_version",
        keys=frozenset({"task_id", "head_version", "tail_version"}),
        # A task's file is in the folder of its newest version; within it, samples end at versions of their own.
        columns={"group_id": "task_id"}, step_in_name=r"(?:^|/)(\d+)/[^/]*$",
        note="it holds texts, rewards and weight versions, no log-probs; versions without version_rle (before "
        "AReaL 2.0) are those of a whole task, its prompt included",
    ),
    Source(
        format="verl", framework="verl", what="verl's rollout dump", because="the keys input, output, score and step",
        keys=frozenset({"input", "output", "score", "step"}), columns=VERL_COLUMNS,
        step_in_name=r"(?:^|/)(\d+)\.jsonl", note="verl itself writes texts and scores there, no log-probs",
    ),
    Source(
        format="verl-validation", framework="verl", what="verl's validation dump",
        because="the key reward, which its training dumps do not have",
        keys=frozenset({"input", "output", "score", "step", "reward"}), lacks=frozenset({"request_id"}),
        columns=VERL_COLUMNS, step_in_name=r"(?:^|/)(\d+)\.jsonl",
        note="it holds validation texts and scores, nothing that was trained on",
    ),
)  # fmt: skip
"""In order of preference: where a folder holds several that say the same, the first is read."""

SAYING = {*LOGPS, *(f.column for f in DIVERGENCES), "completion"}
"""Of the plain schema, a log of sequences has one of these; rewards alone are a table of metrics."""


def source(format: str) -> Source:
    """The kind of log with this format."""
    return next(s for s in SOURCES if s.format == format)


def source_of(names: Collection[str]) -> Source | None:
    """The kind of log whose rows have these names; None if it is not known."""
    there = set(names)
    fit = [s for s in SOURCES if s.keys and there >= s.keys and not there & s.lacks]
    if fit:
        return max(fit, key=lambda s: len(s.keys))
    return PLAIN if SAYING & set(PLAIN.resolve(there, {})) else None


def rank(source: Source, columns: Collection[str]) -> tuple[int, int]:
    """Sort key for choosing among several logs in a folder: the smallest key has the most useful fields.

    Args:
        source: what kind of log it is.
        columns: fields that it has.
    """
    both = "logp_rollout" in columns and ("logp" in columns or "logp_old" in columns)
    return -(both + ("logp_rollout" in columns)), SOURCES.index(source)
