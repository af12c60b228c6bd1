"""`record`: one call in any training loop, and its log can be audited."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Shaped
from numpy import ndarray
from torch import Tensor

from offdrift.errors import BadValueError
from offdrift.rollouts.recorder import Recorder
from offdrift.rollouts.unpacked import Unpacked, text_ids

Values: TypeAlias = Shaped[Tensor, "..."] | Shaped[ndarray, "..."] | Sequence[Any] | float | int

_OPEN: dict[str, Recorder] = {}
_LOCK = threading.Lock()


def record(
    folder: str | os.PathLike[str] | Recorder,
    *,
    step: Values,
    logp_rollout: Values | None = None,
    logp_old: Values | None = None,
    logp: Values | None = None,
    logp_ref: Values | None = None,
    mask: Values | None = None,
    cu_seqlens: Values | None = None,
    advantages: Values | None = None,
    rewards: Values | None = None,
    group_ids: Values | Sequence[str] | None = None,
    tokens: Values | None = None,
    prompts: Sequence[str] | None = None,
    completions: Sequence[str] | None = None,
    version: Values | None = None,
    rollout_version: Values | None = None,
    entropy: Values | None = None,
    old_status: Values | None = None,
    truncated: Values | None = None,
    response_lengths: Values | None = None,
    divergences: Mapping[str, Values] | None = None,
) -> Recorder:
    """Record what a step knew of its tokens; returns at once, a thread writes.

    Token values are padded `[b, time]` with `mask`, or packed `[n]` with `cu_seqlens` (and `mask`, if
    some tokens do not train). Value `[i, t]` describes token `[i, t]`: log-probs are those *of* the
    token that stands there. What a loop does not have it leaves out.

    Args:
        folder: of the log, made at the first call; or a `Recorder` with settings of your own. The
            recorder of a folder is closed when the process ends.
        step: counts optimizer steps; one number, or one per sequence (as `version`).
        logp_rollout: log-probs of the engine that drew the tokens, of the distribution that it drew
            from, nats.
        logp_old: log-probs of the training engine before the first update on this batch.
        logp: log-probs of the policy being trained; the graph is not kept.
        logp_ref: log-probs of the frozen reference policy.
        mask: nonzero where a token trains; padding, prompt and tool output are 0 and not recorded.
        cu_seqlens: starts of the sequences in the packed tokens, first 0, last `n`.
        advantages: per token, or per sequence `[b]`; what has the tokens' shape is per token.
        rewards: per sequence.
        group_ids: per sequence, numbers or texts; responses to one prompt share theirs within a step.
            Without, equal `prompts` are a group.
        tokens: ids.
        prompts: texts.
        completions: texts.
        version: of the weights being trained, optimizer steps taken so far.
        rollout_version: of the weights that drew the tokens; per token, per sequence, or one number.
        entropy: of the policy being trained, nats.
        old_status: how a response's `logp_old` was come by: 0 exact (the training engine at the weights
            that sampled), 1 stale (at others), 2 approximated, 3 missing (the rollout's stand in).
        truncated: 1 where a response hit its length limit.
        response_lengths: tokens of each whole response. Without, from its first to its last token
            that trains.
        divergences: exact ones by name (`kl_rollout_current`, ...), nats per token.

    NaN and infinite values are written as they are: readers leave such tokens out and count them by
    field, so that an audit shows them. A sequence without a token keeps its row.

    Raises: `ShapeError` if a field has the shape of neither tokens nor sequences; `BadValueError` for
        a prompt or completion that is no text; `RecordError` if an earlier batch could not be written.

    Example:
        >>> from tempfile import mkdtemp
        >>> logp = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]])
        >>> log = record(mkdtemp(), step=1, logp_rollout=logp - 0.1, logp=logp,
        ...              mask=torch.tensor([[1, 1], [1, 0]]), rewards=[1.0, 0.0])
        >>> log.close()
        >>> log.written, log.dropped
        (1, 0)
    """
    if isinstance(group_ids, Sequence) and any(isinstance(x, str) for x in group_ids):
        group_ids = text_ids(_texts("group_ids", group_ids) or ())
    given: dict[str, Any] = {
        "step": step, "logp_rollout": logp_rollout, "logp_old": logp_old, "logp": logp,
        "logp_ref": logp_ref, "mask": mask, "cu_seqlens": cu_seqlens, "advantages": advantages,
        "rewards": rewards, "group_ids": group_ids, "tokens": tokens, "version": version,
        "rollout_version": rollout_version, "entropy": entropy, "old_status": old_status, "truncated": truncated,
        "response_lengths": response_lengths,
    }  # fmt: skip
    batch = Unpacked(
        divergences={name: torch.as_tensor(x) for name, x in (divergences or {}).items()},
        prompts=_texts("prompts", prompts),
        completions=_texts("completions", completions),
        **{name: torch.as_tensor(x) for name, x in given.items() if x is not None},
    )
    recorder = folder if isinstance(folder, Recorder) else _recorder(folder)
    recorder.add(batch)
    return recorder


def _recorder(folder: str | os.PathLike[str]) -> Recorder:
    key = os.path.abspath(folder)
    with _LOCK:
        if key not in _OPEN or _OPEN[key].closed:
            _OPEN[key] = Recorder(folder)
        return _OPEN[key]


def _texts(name: str, texts: Sequence[str] | None) -> tuple[str, ...] | None:
    for i, text in enumerate(texts or ()):
        if not isinstance(text, str):
            raise BadValueError(
                f"{name}[{i}] is of type {type(text).__name__}; give one text per sequence, such as "
                "the rendered chat template"
            )
    return None if texts is None else tuple(texts)
