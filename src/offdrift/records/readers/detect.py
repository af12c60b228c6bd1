"""Finding logs and telling which framework wrote them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from offdrift.errors import OffdriftError, RecordError
from offdrift.records.readers import files
from offdrift.records.readers.arrow import is_number, present, type_of
from offdrift.records.readers.formats.base import PER_ROW, Source
from offdrift.records.readers.formats.slime import NotRead
from offdrift.records.readers.formats.table import PLAIN, TRL, rank, source_of
from offdrift.records.readers.look import Look, look
from offdrift.records.readers.types import LIMIT, BadRow, Detected
from offdrift.records.schema import COLUMNS, LISTS

BESIDE = "|".join((
    r"/eval-rollout/",
    r"(^|/)(rollout_)?eval_[^/]*$",
    r"(^|/)[^/]*_metadata\.jsonl$",
    r"(^|/)val_data_step\d+\.jsonl$",
    r"/rollouts/step_\d+/(eval/.*|train/all)/traces\.jsonl$",
    r"(^|/)policy_loss_debug/[^/]*$",
))  # fmt: skip
"""Files that lie beside logs and are none: evaluations, open-instruct's description of a run, prime-rl's
episodes that never trained, miles' single calls of its loss."""

ELSEWHERE: Mapping[str, str] = MappingProxyType({
    r"val_data_step\d+\.jsonl$": "NeMo-RL's training data is train_data_stepN.jsonl, which its "
    "single controller (asynchronous, with data_plane.enabled) does not write: record the loss's "
    "tokens, nemo_rl.install(METHOD, record=FOLDER)",
})  # fmt: skip
"""What to do where only what lies beside a log is there."""

NAMED = 8
"""Columns that are not used and named."""

TRIED = 8
"""Files of one shape of name that are looked at until one can be read."""

NOTHING: Mapping[str, str] = MappingProxyType({})


class _Unknown(NamedTuple):
    files: list[str]
    why: str
    damaged: bool
    """It cannot be read at all, as opposed to holding something else."""
    known: bool = False
    """What it holds is known, and not to be read."""


class _Found(NamedTuple):
    source: Source
    seen: Look
    files: list[str]


def detect(paths: Sequence[str], *, columns: Mapping[str, str] = NOTHING, limit: int = LIMIT) -> Detected:
    """Find the logs that paths name, and tell what they are.

    Args:
        paths: files, folders, globs, or URLs of any store that fsspec knows.
        columns: column of the log by field, where it has a name of its own; dots lead into objects;
            "" for a field that is not to be read.
        limit: bytes that one file may take in memory, or decompress to; one that takes more is left
            out when it is read, and said so.

    Raises: `RecordError` if a path leads nowhere, nothing there is a log, a field of `columns` is
        none, or a mapped column is not in the log.

    Example:
        >>> detect(["run/logs"])  # doctest: +SKIP
        Detected(format='plain', framework='offdrift', files=('run/logs/1.parquet', ...
    """
    asked = _fields(columns)
    mapped = {name: column for name, column in asked.items() if column}
    without = tuple(name for name, column in asked.items() if not column)
    there, unreadable = files.find(paths)
    named, repeated = files.unrepeated(there)
    skipped = [f for f in named if f not in paths and re.search(BESIDE, f)]
    kept = [f for f in named if f not in set(skipped)]
    found, unknown = _kinds(kept, mapped, limit)
    if not found:
        raise RecordError(_nothing(named, unknown, unreadable))
    best = min(found, key=lambda f: rank(f.source, _columns(f, mapped)))
    # What cannot be read may well be one of these, damaged: the reader will say so, file by file.
    suffix = best.files[0].rsplit(".")[-1]
    damaged = [u for u in unknown if u.damaged and u.files[0].endswith(suffix)]
    unknown = [u for u in unknown if u not in damaged]
    chosen = {*best.files, *(f for u in damaged for f in u.files)}
    best = best._replace(files=[f for f in kept if f in chosen])
    of_ranks: tuple[str, ...] = ()
    if best.source.distinct is not None:
        read = best.source.distinct(best.files, limit)
        of_ranks = tuple(f for f in best.files if f not in set(read))
        best = best._replace(files=read)
    resolved = {n: c for n, c in _resolved(best, mapped).items() if n not in without}
    return Detected(
        format=best.source.format,
        framework=best.seen.framework or best.source.framework,
        files=tuple(best.files),
        said=_said(best, found, unknown, skipped, resolved, repeated, len(of_ranks), unreadable),
        columns=resolved,
        sizes=tuple(files.size(f) for f in best.files),
        skipped=tuple(unreadable),
        repeats=of_ranks,
        limit=limit,
        without=without,
    )


def _fields(columns: Mapping[str, str]) -> dict[str, str]:
    fields = {other: name for name, f in COLUMNS.items() for other in f.spellings}
    named = {fields.get(name, name): column for name, column in columns.items()}
    for name in named:
        if name not in COLUMNS:
            raise RecordError(f"columns: {name!r} is no field; the fields are {', '.join(COLUMNS)}")
    return named


def _kinds(named: Sequence[str], mapped: Mapping[str, str], limit: int) -> tuple[list[_Found], list[_Unknown]]:
    """Files by kind, told from one file of every shape of name; and why others are no log."""
    shapes: dict[str, list[str]] = {}
    for file in named:
        shapes.setdefault(re.sub(r"\d+", "#", file), []).append(file)
    found: list[_Found] = []
    unknown: list[_Unknown] = []
    for alike in shapes.values():
        first, why = _first(alike, limit)
        if first is None:
            unread = isinstance(why, NotRead)
            unknown.append(_Unknown(alike, str(why), not unread, unread))
            continue
        source = first.source or source_of(first.names)
        if mapped and set(mapped.values()) <= {*first.names, *first.inner}:
            source = source or PLAIN
        if source is None:
            contents = f"{alike[0]} holds {', '.join(first.names[:12]) or 'nothing'}"
            unknown.append(_Unknown(alike, contents, False))
            continue
        same = next((f for f in found if f.source is source), None)
        if same is None:
            found.append(_Found(source, first, list(alike)))
        else:
            same.files.extend(alike)
    return found, unknown


def _first(alike: Sequence[str], limit: int) -> tuple[Look | None, OffdriftError | None]:
    """What the first of some files that can be read holds, or why the first cannot."""
    why = None
    empty = None
    for file in alike[:TRIED]:
        try:
            first = look(file, limit)
        except OffdriftError as e:
            why = why or e
            continue
        if first.names or first.source:
            return first, None
        empty = empty or first
    return empty, why


def _resolved(best: _Found, mapped: Mapping[str, str]) -> dict[str, str]:
    if best.source.adapt is not None or not best.seen.names:
        aligned = [name for name in mapped if name not in PER_ROW]
        if aligned or (mapped and not best.seen.names):
            raise RecordError(
                f"columns: {', '.join(aligned or mapped)} cannot be mapped in {best.source.what}, "
                "which are read by their own layout; convert the log to the plain schema"
            )
        return _columns(best, mapped)
    for name, column in mapped.items():
        if name in LISTS and column in best.seen.single:
            raise RecordError(
                f"columns: {name}={column}, but {column} holds one value per row, and {name} is a "
                f"list with one per token; leave it out, or --columns {name}= if it has that name"
            )
        if column not in best.seen.names and column not in best.seen.inner:
            raise RecordError(
                f"columns: {name}={column}, but {best.files[0]} has no {column}; it has {', '.join(best.seen.names)}"
            )
    columns = _columns(best, mapped)
    if best.seen.schema is None:
        single = {n for n, column in columns.items() if n in LISTS and column in best.seen.single}
        return {name: column for name, column in columns.items() if name not in single}
    readable = present(best.seen.schema, columns)
    for name in mapped.keys() - readable.keys():
        kind = type_of(best.seen.schema, mapped[name])
        raise RecordError(f"columns: {name}={mapped[name]}, but that column is {kind}")
    if best.source is TRL and "reward" not in readable:
        # One column per reward function, under the function's name; the weights are not logged.
        rewards = [f.name for f in best.seen.schema if is_number(f.type) and f.name not in readable.values()]
        if len(rewards) == 1:
            return {**readable, "reward": rewards[0]}
    return readable


def _columns(found: _Found, mapped: Mapping[str, str]) -> dict[str, str]:
    """Column by field, as far as names tell."""
    if found.source.adapt is not None or not found.seen.names:
        return {**found.source.columns, **mapped}
    return found.source.resolve((*found.seen.names, *found.seen.inner), mapped)


def _nothing(named: Sequence[str], unknown: Sequence[_Unknown], unreadable: Sequence[BadRow]) -> str:
    if not named and unreadable:
        file, _, reason = unreadable[0][:3]
        return f"no log that can be read: {file}: {reason}"
    if not unknown:
        hint = next((h for p, h in ELSEWHERE.items() if any(re.search(p, f) for f in named)), "")
        evaluation = f"{_files(len(named))} of evaluation or metadata, no log; the first is {named[0]}"
        return f"{evaluation}. {hint}".rstrip(". ")
    why = unknown[0].why.rstrip(". ")
    if all(u.known for u in unknown):
        return f"no log that can be read: {why}"
    if re.search("it was (refused|not run)$", why):
        return (
            f"no log that can be read: {why}. Save tensors, numbers, texts, lists and dicts alone, "
            "or write the plain schema of docs/logs.md"
        )
    if all(u.damaged for u in unknown):
        return f"no log that can be read: {why}. Copy or write the file again, or leave it out"
    return (
        f"no log that is known: {why}. Map the columns of another log, such "
        "as --columns logp_rollout=NAME,logp=NAME; docs/logs.md has the fields"
    )


def _unused(best: _Found, columns: Mapping[str, str]) -> list[str]:
    """Which columns of numbers are not read, where naming them to `columns` would have them read."""
    if best.source.adapt is not None:
        return []
    names = [n[:60] for n in best.seen.numeric if n not in columns.values()]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"not used: {', '.join(names[:NAMED])}{more}; map with --columns"] if names else []


def _files(n: int) -> str:
    return f"{n} file{'' if n == 1 else 's'}"


def _said(
    best: _Found,
    found: Sequence[_Found],
    unknown: Sequence[_Unknown],
    skipped: Sequence[str],
    columns: Mapping[str, str],
    repeated: int,
    of_ranks: int,
    unreadable: Sequence[BadRow],
) -> str:
    said = [f"found {best.source.what}, told by {best.source.because}"]
    renamed = {name: column for name, column in columns.items() if name != column}
    if renamed:
        said.append("reading " + ", ".join(f"{name} from {c}" for name, c in renamed.items()))
    if best.source.note:
        said.append(best.source.note)
    said += _unused(best, columns)
    for other in found:
        if other.source is not best.source:
            said.append(f"not reading {_files(len(other.files))} of {other.source.what}")
    said += [f"not reading {_files(len(u.files))} ({u.why})" for u in unknown if u.known]
    strange = [u for u in unknown if not u.known]
    if strange:
        names = ", ".join(u.files[0] for u in strange[:3])
        said.append(f"not reading {names}, which is no known log")
    if skipped:
        said.append(f"not reading {_files(len(skipped))} of evaluation or metadata")
    if repeated:
        said.append(f"{_files(repeated)} named again by another path, counted once")
    if of_ranks:
        said.append(f"not reading {_files(of_ranks)} of ranks that hold the samples of another rank")
    if unreadable:
        names = ", ".join(f"{b.file} ({b.reason})" for b in unreadable[:3])
        said.append(f"{_files(len(unreadable))} cannot be read: {names}")
    return "; ".join(said)
