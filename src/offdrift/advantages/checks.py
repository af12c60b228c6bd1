"""What `advantages` refuses: inputs of another batch, and numbers that no reward or policy can be."""

from __future__ import annotations

import torch
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError
from offdrift.numerics import check_tensor
from offdrift.segments import Segments


def check_rewards(rewards: Tensor, segments: Segments) -> None:
    """One finite reward per sequence or per token."""
    check_tensor("rewards", rewards)
    if rewards.shape not in ((len(segments),), (segments.num_tokens,)):
        raise ShapeError(
            f"rewards of shape {tuple(rewards.shape)} for {len(segments)} sequences of {segments.num_tokens} "
            "tokens; give one per sequence or one per token"
        )
    _refuse("reward", rewards, segments, per_sequence=len(rewards) == len(segments))


def check_entries(
    given: dict[str, Tensor | None], segments: Segments, *, per_sequence: bool
) -> None:
    """One finite entry per sequence or per token, whichever it must be."""
    length = len(segments) if per_sequence else segments.num_tokens
    for name, x in given.items():
        if x is None:
            continue
        check_tensor(name, x)
        if x.ndim == 0 or len(x) != length or x.ndim != (2 if name == "components" else 1):
            raise ShapeError(
                f"{name} has shape {tuple(x.shape)}; expected {length} entries, one per "
                f"{'sequence' if per_sequence else 'token'}"
            )
        _refuse(name, x, segments, per_sequence=per_sequence)


def _refuse(name: str, x: Tensor, segments: Segments, *, per_sequence: bool) -> None:
    """Raise `BadValueError` for the first entry that is not finite."""
    bad = ~x.isfinite()
    if not bool(bad.any()):
        return
    row = int(bad.reshape(len(x), -1).any(1).nonzero()[0])
    sequence = row if per_sequence else int(segments.seq_ids[row])
    where = "" if per_sequence else f" at token {row - int(segments.cu_seqlens[sequence])}"
    raise BadValueError(
        f"{name} of sequence {sequence} is {x[bad][0].item()}{where}; give every sequence finite "
        "numbers or leave it out of the batch"
    )


def check_component_weights(weights: Tensor | None, components: Tensor | None) -> None:
    """One finite weight per column."""
    if weights is None:
        return
    check_tensor("component_weights", weights)
    columns = None if components is None else components.shape[1]
    if columns is not None and weights.shape != (columns,):
        raise ShapeError(
            f"component_weights has shape {tuple(weights.shape)} for {columns} components; give "
            "one weight per column"
        )
    if not bool(weights.isfinite().all()):
        raise BadValueError(f"component_weights={weights.tolist()} must be finite numbers")


def check_position(position: Tensor | None, segments: Segments) -> None:
    """Columns grow along each sequence."""
    if position is None or len(position) == 0:
        return
    first = segments.position == 0
    behind = torch.cat([position[:1] - 1, position[:-1]])
    bad = (position < 0) | (~first & (position <= behind))
    if bool(bad.any()):
        token_index = int(bad.nonzero()[0])
        sequence = int(segments.seq_ids[token_index])
        raise BadValueError(
            f"position of sequence {sequence} is {int(position[token_index])} at token "
            f"{token_index - int(segments.cu_seqlens[sequence])}; a token's column in the response "
            "is at least 0 and grows along the sequence"
        )
