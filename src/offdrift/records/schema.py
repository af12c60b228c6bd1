"""The fields of a log: one table, from which whatever records, stores, reads or documents logs derives.

Each attribute of `LogValues` is one row, with the tensor's type, what it is per, how files store it, the names that
frameworks give it, and its description; a new field is one attribute there.
"""

# ruff: noqa: RUF009 (each call of `_row` makes a dataclass field of its own)
from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor

LOG_KEY, ROLLOUTS_KEY = b"offdrift.log", b"offdrift"
"""Keys of the headers of Parquet files: logs in the plain schema, and rollout records."""

OLD_STATUS = ("exact", "stale", "approximated", "missing")
"""How old log-probs were come by, best first: the training engine's at the weights that drew the token; at other
weights, so that `mismatch` contains staleness; by averaged or interpolated policies; or not at all, with the rollout
policy in their place.

Reference: "Missing Old Logits", arXiv:2605.12070.
"""

Per = Literal["token", "sequence", "token or sequence"]
"""What there is one value for. "token or sequence": a log may have either; in a batch, always per token."""


@dataclass(frozen=True, kw_only=True)
class LogField:
    """One row of the table."""

    name: str
    """Attribute of a batch, and argument of `record`."""
    column: str
    """Name of the column in files; "" for what is not stored."""
    per: Per
    dtype: Literal["float32", "int8", "int32", "int64", "string"]
    """Type in files."""
    about: str
    default: str = ""
    """What is assumed without it."""
    spellings: tuple[str, ...] = ()
    """Other names of the column that mean one thing only."""
    words: Mapping[str, int] = field(default_factory=dict)
    """Words that a log may hold in place of the numbers."""
    other_word: int = 0
    """The number for any other word."""
    least: int | None = None
    """The smallest integer that can be; None: any."""
    text_ids: bool = False
    """A log may hold texts in place of the numbers: only which are equal counts."""
    one_for_all: bool = False
    """A training loop may give one number for all sequences of a batch."""
    repeats: bool = False
    """Values repeat, so that files hold each of them once."""
    argument: bool = True
    """A training loop gives it to `record`; otherwise it is computed."""

    @property
    def is_text(self) -> bool:
        return self.dtype == "string"

    @property
    def is_whole(self) -> bool:
        return self.dtype.startswith("int")

    @property
    def most(self) -> int:
        """The largest integer that can be: of lengths and places as many as a list may have, of counters what a double
        holds exactly."""
        return 2**31 - 1 if self.dtype == "int32" or self.column == "response_length" else 2**53

    @property
    def by_token(self) -> bool:
        """In a batch, one value per token."""
        return self.per != "sequence"


def _row(per: Per, dtype: str, about: str, *, required: bool = False, repr: bool = True, **more: Any) -> Any:
    """A row of the table; a batch may lack what is not `required`."""
    metadata = {"per": per, "dtype": dtype, "about": about, **more}
    return field(metadata=metadata) if required else field(default=None, repr=repr, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class LogValues:
    """Values of `n` tokens in `b` sequences; what a log does not hold is None."""

    step: Int[Tensor, " b"] = _row(
        "sequence",
        "int64",
        "optimizer step, or another counter that the log goes by",
        least=0,
        default="`step_N` in the file's path, or 0",
        one_for_all=True,
        repeats=True,
        required=True,
    )
    row: Int[Tensor, " b"] = _row(
        "sequence",
        "int64",
        "place of the sequence in its file: line or row number, from 1",
        column="",
        argument=False,
        required=True,
    )
    response_lengths: Int[Tensor, " b"] = _row(
        "sequence",
        "int64",
        "tokens of the whole response, those that are masked or left out included",
        least=0,
        default="from the first to the last token that trains",
        column="response_length",
        spellings=("response_lengths",),
        required=True,
    )
    logp_rollout: Float[Tensor, " n"] | None = _row(
        "token",
        "float32",
        "log mu: log-prob of the sampled token, nats, under the distribution that the engine drew it "
        "from (after temperature and top-p)",
        spellings=("rollout_log_probs", "rollout_logprobs", "inference_logprobs"),
    )
    logp_old: Float[Tensor, " n"] | None = _row(
        "token",
        "float32",
        "log pi_old: from the training engine before the first update on this batch",
        spellings=("old_log_probs", "old_logprobs"),
    )
    logp: Float[Tensor, " n"] | None = _row("token", "float32", "log pi: of the policy being trained")
    logp_last: Float[Tensor, " n"] | None = _row(
        "token",
        "float32",
        "log pi just before the last update that trains on the token, where several do (epochs): less `logp`, how far "
        "the policy moved while the batch was used again",
        default="each token is trained on once",
    )
    logp_ref: Float[Tensor, " n"] | None = _row(
        "token",
        "float32",
        "log-prob of the frozen reference policy",
        spellings=("ref_log_probs", "ref_log_prob", "ref_logprobs"),
    )
    advantages: Float[Tensor, " n"] | None = _row(
        "token or sequence",
        "float32",
        "advantage; what has the shape of the tokens is per token",
        spellings=("advantage",),
    )
    rewards: Float[Tensor, " b"] | None = _row(
        "sequence", "float32", "reward; an unknown one is NaN", column="reward", spellings=("rewards", "score")
    )
    group_ids: Int[Tensor, " b"] | None = _row(
        "sequence",
        "int64",
        "number or text that responses to one prompt share within a step",
        default="equal prompts are a group",
        column="group_id",
        spellings=("group_ids",),
        text_ids=True,
    )
    rollout_version: Int[Tensor, " n"] | None = _row(
        "token or sequence", "int32", "version of the weights that drew the token", least=-1, repeats=True
    )
    newest_version: Int[Tensor, " b"] | None = _row(
        "sequence",
        "int64",
        "newest version of the weights that drew a part of the response, where the log does not say which tokens; "
        "`rollout_version` is then the oldest",
        default="`rollout_version` says all",
        repeats=True,
    )
    version: Int[Tensor, " b"] | None = _row(
        "sequence",
        "int64",
        "version of the weights being trained: optimizer steps taken so far",
        least=-1,
        one_for_all=True,
        repeats=True,
    )
    updates_before: Int[Tensor, " b"] | None = _row(
        "sequence",
        "int64",
        "optimizer steps on the sequence's batch before this one (earlier minibatches)",
        least=0,
        default="unknown: the version lag counts them",
        one_for_all=True,
        repeats=True,
    )
    position: Int[Tensor, " n"] | None = _row(
        "token",
        "int32",
        "place of the token in its response, from 0",
        least=0,
        default="the lists leave no token out",
        argument=False,
    )
    turn_ids: Int[Tensor, " n"] | None = _row(
        "token",
        "int32",
        "turn of an episode that the token is of, from 0: methods of turns read it",
        default="a response is one turn",
        repeats=True,
    )
    entropy: Float[Tensor, " n"] | None = _row(
        "token", "float32", "entropy of the policy being trained, nats", spellings=("entropies",)
    )
    tokens: Int[Tensor, " n"] | None = _row("token", "int32", "token ids", spellings=("response_ids", "completion_ids"))
    old_status: Int[Tensor, " b"] | None = _row(
        "sequence",
        "int8",
        "how `logp_old` was come by, the worst of the sequence's tokens: 0 `exact` (the training engine "
        "at the weights that sampled), 1 `stale` (at others), 2 `approximated`, 3 `missing` (the "
        "rollout's own stand in)",
        words={status: code for code, status in enumerate(OLD_STATUS)},
        other_word=-1,
    )
    truncated: Int[Tensor, " b"] | None = _row(
        "sequence",
        "int8",
        "1, or the finish reason `length`, where the response hit its length limit",
        words={"length": 1, "truncated": 1},
    )
    selected: Int[Tensor, " b"] | None = _row(
        "sequence",
        "int8",
        "1 where prompts or group sizes were chosen by rewards, as by dynamic sampling, or by how long responses took, "
        "as in an asynchronous run that takes first what has finished first: no independent sample, so that no "
        "certificate is made",
        default="0",
        one_for_all=True,
        repeats=True,
    )
    workers: tuple[str, ...] | None = _row(
        "sequence",
        "string",
        "name of the rollout worker that drew the last token of the response",
        default="one worker drew all",
        column="worker",
        repeats=True,
    )
    ranks: tuple[str, ...] | None = _row(
        "sequence",
        "string",
        "rank of the trainer that scored the response",
        default="`rank_N` in the file's path, or one rank scored all",
        column="rank",
        spellings=("dp_rank", "trainer_rank"),
        repeats=True,
    )
    environments: tuple[str, ...] | None = _row(
        "sequence",
        "string",
        "name of the environment, task or data set that the prompt is from",
        default="all prompts are of one kind",
        column="environment",
        spellings=("env_name", "data_source"),
        repeats=True,
    )
    clusters: tuple[str, ...] | None = _row(
        "sequence",
        "string",
        "name of what the prompt shares with others (a document, a template): one independent draw of a certificate",
        default="prompts share nothing",
        column="cluster",
        repeats=True,
    )
    queue_seconds: Float[Tensor, " b"] | None = _row(
        "sequence",
        "float32",
        "seconds from the submission of the response's group until a worker began its first token",
    )
    generation_seconds: Float[Tensor, " b"] | None = _row(
        "sequence", "float32", "seconds from the beginning of the response's first token to its end"
    )
    drawn_by: tuple[str, ...] | None = _row(
        "sequence",
        "string",
        "what drew the response: the fields of `offdrift.records.Provenance` as a JSON object (its `as_text()`), or "
        "words",
        default="one engine drew all",
        spellings=("provenance",),
        repeats=True,
        repr=False,
    )
    mix_alpha: Float[Tensor, " b"] | None = _row(
        "sequence",
        "float32",
        "share of a teacher's logits in those that the response was drawn from, [0, 1] (logit fusion); `logp_rollout` "
        "is then the mixture's",
        default="the policy drew alone",
    )
    temperatures: Float[Tensor, " b"] | None = _row(
        "sequence",
        "float32",
        "sampling temperature that the response was drawn at",
        column="temperature",
        spellings=("sampling_temperature",),
        default="as `drawn_by` or the run's recipe says",
        argument=False,
    )
    prompts: tuple[str, ...] | None = _row(
        "sequence",
        "string",
        "text of the prompt, or a list of chat messages in a file",
        column="prompt",
        spellings=("input",),
        repeats=True,
        repr=False,
    )
    completions: tuple[str, ...] | None = _row(
        "sequence",
        "string",
        "text of the response, or a list of chat messages in a file",
        column="completion",
        spellings=("response", "output"),
        repr=False,
    )
    trainable: Int[Tensor, " b"] | None = _row(
        "sequence",
        "int64",
        "tokens of the response that may train, scored or not",
        default="those of the batch",
        column="",
        argument=False,
    )


FIELDS: tuple[LogField, ...] = tuple(
    LogField(name=f.name, **{"column": f.name, **f.metadata}) for f in fields(LogValues)
)
"""The rows of the table: the attributes of a batch."""

MASK = LogField(
    name="mask",
    column="mask",
    per="token",
    dtype="int8",
    about="nonzero where a token trains; padding, prompt and tool output are 0 and left out",
    default="every token trains",
    spellings=("response_mask", "loss_mask"),
)
"""What leaves tokens out, so that no batch holds it."""

DIVERGENCE_KINDS = {"kl": "KL({} || {}), nats", "tv": "total variation of {} and {}"}
FORWARD = (("rollout", "current"), ("rollout", "old"), ("old", "current"))
DIVERGENCE_PAIRS = {"kl": (*FORWARD, ("current", "old")), "tv": FORWARD}
DIVERGENCES: tuple[LogField, ...] = tuple(
    LogField(
        name=f"{kind}_{first}_{second}",
        column=f"{kind}_{first}_{second}",
        per="token",
        dtype="float32",
        about=f"exact full-vocabulary {DIVERGENCE_KINDS[kind].format(first, second)}",
    )
    for kind, pairs in DIVERGENCE_PAIRS.items()
    for first, second in pairs
)
"""What `divergences` of a batch may hold, by name."""

POLICIES = ("logp_rollout", "logp_old", "logp")
"""The policies that an audit compares."""
LOGPS = (*POLICIES, "logp_last", "logp_ref")
PADDING = "padding/end"
"""Beside "FIELD/CAUSE" among the tokens that no policy scores: those at the ends of rows, which were left out."""

BY_TOKEN = tuple(f for f in FIELDS if f.by_token)
BY_SEQUENCE = tuple(f for f in FIELDS if not f.by_token)
ARGUMENTS = tuple(f for f in (*FIELDS, MASK) if f.argument)
"""What a training loop may give to `record`."""
HELD = tuple(f.name for f, d in zip(FIELDS, fields(LogValues)) if f.column and d.default is None)
"""What a log may hold or not: the names in the audit's `has`, with those of divergences."""

COLUMNS: Mapping[str, LogField] = {f.column: f for f in (*BY_TOKEN, MASK, *DIVERGENCES, *BY_SEQUENCE) if f.column}
"""What a reader looks for, by name of the column: values per token first."""
LISTS = tuple(c for c, f in COLUMNS.items() if f.per == "token")
"""Per token, and nothing else: a column of single numbers is another thing of that name."""
EITHER = tuple(c for c, f in COLUMNS.items() if f.per == "token or sequence")
TEXTS = tuple(c for c, f in COLUMNS.items() if f.is_text)


def describe_arguments() -> str:
    """The fields that `record` takes, one paragraph each, as its docstring shows them."""
    described = (
        f"{f.name}: per {f.per}: {f.about}."
        + (f" Without it: {f.default}." if f.default and f.name != "step" else "")
        + (" One number may stand for all sequences." if f.one_for_all else "")
        for f in ARGUMENTS
    )
    return "\n".join(textwrap.fill(d, 104, initial_indent=" " * 8, subsequent_indent=" " * 12) for d in described)


def table() -> list[str]:
    """The columns of a log as a Markdown table, for docs/logs.md."""
    lines = ["| column | per | type | what | also read as |", "|---|---|---|---|---|"]
    for column, f in COLUMNS.items():
        about = f.about + (f"; without the column: {f.default}" if f.default else "")
        about += f"; `{f.name}=` of `record`" if f.argument and f.name != column else ""
        also = ", ".join(f"`{name}`" for name in f.spellings)
        lines.append(f"| `{column}` | {f.per} | {f.dtype} | {about.replace('|', chr(92) + '|')} | {also} |")
    return lines
