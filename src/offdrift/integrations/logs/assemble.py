"""Columns of a log to `Logged`: rows that do not fit are named, tokens that cannot count are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from offdrift.integrations.logs.columns import Columns, Lists, cumulative
from offdrift.integrations.logs.fields import DIVERGENCES, EITHER, FLOATS, INTEGERS, LOGPS
from offdrift.integrations.logs.scored import response_positions, scored
from offdrift.integrations.logs.types import BadRow, Read
from offdrift.rollouts.logged import Logged

RARE = "only {have} of {b} rows here have {name}: the field is left out, the rows are kept"

STEP_STRIDE = 0x9E3779B97F4A7C15 - 2**64
"""An odd 64-bit number: `group + step * STEP_STRIDE` keeps equal ids of different steps apart."""


def assemble(columns: Columns, *, file: str, step: int | None = None) -> Read:
    """The rows as a batch, and those that are not usable.

    Args:
        columns: as decoded.
        file: for the messages.
        step: of rows that do not say; None: 0 if no row says.
    """
    columns, rare = _common(columns, file)
    columns, bad = _usable(columns, file, step)
    bad = tuple(sorted((*rare, *bad), key=lambda b: b.row))
    return Read(_logged(columns, step) if len(columns.row) else None, bad)


def _common(columns: Columns, file: str) -> tuple[Columns, list[BadRow]]:
    """Without the lists that no row has, and those beside the log-probs that most rows lack.

    Tokens that a field does not score are dropped; for the sake of a few rows, that is too much.
    """
    kept: dict[str, Lists] = {}
    rare: list[BadRow] = []
    b = len(columns.row)
    for name, x in columns.lists.items():
        have = b if x.absent is None else int((~x.absent).sum())
        if name in LOGPS or name == "mask" or 2 * have >= b > 0:
            if have:
                kept[name] = x
        elif have:
            first = int(columns.row[~x.absent][0])  # type: ignore[index]
            rare.append(BadRow(file, first, RARE.format(name=name, have=have, b=b)))
    return replace(columns, lists=kept), rare


def _usable(columns: Columns, file: str, step: int | None) -> tuple[Columns, tuple[BadRow, ...]]:
    wrong = torch.zeros(len(columns.row), dtype=torch.bool)
    listed = columns.lists
    if listed:
        longest = torch.stack([x.lengths for x in listed.values()]).amax(0)
        for x in listed.values():
            differs = x.lengths != longest
            wrong |= differs if x.absent is None else differs & ~x.absent
        if all(x.absent is not None for x in listed.values()):
            wrong |= torch.stack([x.absent for x in listed.values() if x.absent is not None]).all(0)
    stepless = torch.zeros_like(wrong)
    if step is None and "step" in columns.numbers:
        stepless = columns.numbers["step"].missing()
        if bool(stepless.all()):
            stepless = torch.zeros_like(wrong)
    bad = tuple(
        BadRow(file, int(columns.row[i]), _reason(listed, i, bool(wrong[i])))
        for i in (wrong | stepless).nonzero().squeeze(-1).tolist()
    )
    return (columns.rows(~(wrong | stepless)), bad) if bad else (columns, bad)


def _reason(lists: dict[str, Lists] | object, i: int, wrong: bool) -> str:
    assert isinstance(lists, dict)
    if not wrong:
        return "the row has no step, though the log has a column for it"
    lengths = {
        name: int(x.lengths[i])
        for name, x in lists.items()
        if x.absent is None or not bool(x.absent[i])
    }
    if not lengths:
        return f"none of {', '.join(lists)} is there"
    said = ", ".join(f"{name} {n}" for name, n in lengths.items())
    return f"lists of unequal length ({said}); all lists of a row describe its response tokens"


def _logged(columns: Columns, step: int | None) -> Logged:
    b = len(columns.row)
    lengths = torch.zeros(b, dtype=torch.int64)
    for x in columns.lists.values():
        lengths = torch.maximum(lengths, x.lengths)
    lists = {name: x.filled(lengths) for name, x in columns.lists.items()}
    if "mask" in lists and (unmasked := columns.lists["mask"].absent) is not None:
        # A row without a mask trains on every token.
        trains = lists["mask"].values.bool() | torch.repeat_interleave(unmasked, lengths)
        lists["mask"] = Lists(trains.long(), lists["mask"].cuts)
    for name in EITHER:
        if name in columns.numbers and name not in lists:
            lists[name] = columns.numbers[name].per_token(lengths)
    steps = _steps(columns, step)
    versions = columns.numbers.get("version")
    if versions is not None and bool(versions.missing().all()):
        versions = None
    checked = dict(lists)
    if versions is not None and bool(versions.missing().any()):
        holes = torch.repeat_interleave(versions.missing(), lengths)
        checked["version"] = Lists(torch.zeros(len(holes)).long(), cumulative(lengths), None, holes)
    keep, unscored = scored(checked)
    cuts, position = cumulative(lengths), None
    if keep is not None:
        position = response_positions(cuts)[keep]
        cuts = torch.cat([cuts.new_zeros(1), keep.cumsum(0)])[cuts]
    if "position" in lists:
        position = lists["position"].values if keep is None else lists["position"].values[keep]

    def tokens(name: str) -> Tensor | None:
        if name not in lists:
            return None
        values = lists[name].values
        return values if keep is None else values[keep]

    by_token = {name: tokens(name) for name in (*FLOATS, *INTEGERS)}
    responses, unit = _response_lengths(columns, lengths)
    rewards = columns.numbers.get("reward")
    if rewards is not None and bool(rewards.missing().all()):
        rewards = None
    truncated = columns.numbers.get("truncated")
    return Logged(
        cu_seqlens=cuts,
        step=steps,
        row=columns.row,
        response_lengths=responses,
        length_unit=unit,
        logp_rollout=by_token["logp_rollout"],
        logp_old=by_token["logp_old"],
        logp=by_token["logp"],
        logp_ref=by_token["logp_ref"],
        advantages=by_token["advantages"],
        rewards=None
        if rewards is None
        else rewards.values.float().masked_fill(rewards.missing(), float("nan")),
        group_ids=_groups(columns, steps),
        rollout_version=by_token["rollout_version"],
        version=None if versions is None else versions.whole(),
        position=position,
        entropy=by_token["entropy"],
        divergences={name: x for name in DIVERGENCES if (x := by_token[name]) is not None},
        tokens=by_token["tokens"],
        truncated=None if truncated is None else truncated.whole(),
        prompts=_texts(columns, "prompt"),
        completions=_texts(columns, "completion"),
        unscored=unscored,
    )


def _steps(columns: Columns, step: int | None) -> Int[Tensor, " b"]:
    default = torch.full((len(columns.row),), step or 0)
    if "step" not in columns.numbers:
        return default
    stated = columns.numbers["step"]
    return torch.where(stated.missing(), default, stated.whole())


def _response_lengths(
    columns: Columns, lengths: Int[Tensor, " b"]
) -> tuple[Int[Tensor, " b"], str]:
    if "response_length" in columns.numbers:
        return torch.maximum(columns.numbers["response_length"].whole(), lengths), "token"
    if not columns.lists and "completion" in columns.texts:
        return torch.tensor([len(t or "") for t in columns.texts["completion"]]), "character"
    return lengths, "token"


def _groups(columns: Columns, steps: Int[Tensor, " b"]) -> Int[Tensor, " b"] | None:
    """The log's own groups, or else equal prompts, within a step."""
    if "group_id" in columns.numbers:
        stated = columns.numbers["group_id"]
        ids, absent = stated.whole(), stated.missing()
    elif (texts := columns.texts.get("group_id") or columns.texts.get("prompt")) is not None:
        ids = torch.tensor([0 if t is None else text_id(t) for t in texts])
        absent = torch.tensor([t is None for t in texts])
    else:
        return None
    if bool(absent.all()):
        return None
    return torch.where(absent, 2**62 + columns.row, ids) + steps * STEP_STRIDE


def text_id(text: str | bytes) -> int:
    """A number that equal texts share, in every process."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def _texts(columns: Columns, name: str) -> tuple[str, ...] | None:
    texts: Sequence[str | None] | None = columns.texts.get(name)
    return None if texts is None else tuple(t or "" for t in texts)


def absent_rows(missing: Sequence[bool]) -> Bool[Tensor, " b"] | None:
    """As a mask; None if no row lacks it."""
    return torch.tensor(missing) if any(missing) else None
