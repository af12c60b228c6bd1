"""Finding logs, telling which framework wrote them, cutting them into pieces that fit memory, and reading a piece."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from offdrift.errors import OffdriftError, RecordError
from offdrift.records.readers import files
from offdrift.records.readers.assemble import assemble
from offdrift.records.readers.columns import Columns, Row, joined, pack
from offdrift.records.readers.files import (
    LIMIT,
    BadRow,
    Budget,
    Bytes,
    Detected,
    NotRead,
    Piece,
    Read,
    missing,
    opened,
    size,
)
from offdrift.records.readers.formats.table import (
    OWN,
    OWN_ROLLOUTS,
    PAYLOADS,
    PER_ROW,
    PLAIN,
    TRL,
    Source,
    function,
    rank,
    source,
    source_of,
)
from offdrift.records.schema import COLUMNS, LISTS, LOG_KEY, POLICIES, ROLLOUTS_KEY

if TYPE_CHECKING:
    import pyarrow as pa

PIECE_BYTES = 64 << 20

Malformed = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What translating a row raises that is not what its source writes."""


def pieces(detected: Detected, *, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Every piece of the logs, in order; the files alone decide where the cuts are.

    A piece has at most `piece_bytes` of decoded columns of Parquet or of JSON lines, unless one row is larger, and at
    most a 64th of what a file may take: decoded, JSON takes up to 25 times its bytes. Other files stay whole.

    Raises: `RecordError` naming the file that is gone.
    """
    most = max(1, min(piece_bytes, detected.limit // files.LINES))
    listed: list[Piece] = []
    for file in detected.files:
        if file.endswith(".parquet"):
            from offdrift.records.readers import parquet  # with pyarrow: JSON lines need neither

            ranges = parquet.cuts(file, detected.columns or source(detected.format).columns, most)
            listed += [Piece(file, start, stop, detected.format, start + 1) for start, stop in ranges]
        elif os.path.splitext(file)[1] in {*PAYLOADS, files.TABLE}:
            listed.append(Piece(file, 0, size(file), detected.format))
        else:
            from offdrift.records.readers import jsonl

            cuts = jsonl.cuts(file, most, detected.limit)
            listed += [Piece(file, start, stop, detected.format, first) for start, stop, first in cuts]
    return listed


def read(piece: Piece, detected: Detected) -> Read:
    """The good rows of a piece as batches, and the others with what is wrong with them.

    Raises: `RecordError` naming a file that is gone; nothing in a file is an error.
    """
    kind = source(detected.format)
    try:
        columns, bad = _decoded(piece, kind, detected)
        if columns is None:
            return Read((), tuple(bad))
        batches, unusable = assemble(columns, file=piece.file, step=kind.step(piece.file))
    except (OSError, MemoryError) as e:  # a disk that fails, too little memory for what is there
        reason = getattr(e, "strerror", None) or str(e) or type(e).__name__
        first = 0 if piece.first_row == 1 else piece.first_row
        return Read((), (BadRow(piece.file, first, f"cannot be read: {reason}", rows=0),))
    return Read(batches, (*bad, *unusable))


def _decoded(piece: Piece, kind: Source, detected: Detected) -> tuple[Columns | None, list[BadRow]]:
    """A piece as columns of the plain schema, None if there is nothing to decode, and what cannot be decoded."""
    file, start, stop, limit = piece.file, piece.start, piece.stop, detected.limit
    mapped = {**detected.columns, **dict.fromkeys(detected.without, "")}
    if file.endswith(".parquet") and not kind.adapt:
        from offdrift.records.readers import parquet

        def wanted(schema: pa.Schema) -> dict[str, str]:
            return parquet.present(schema, kind.resolve(schema.names, mapped))

        parts, bad = parquet.read_rows(file, start, stop, wanted, limit)
        return joined(parts), bad
    if os.path.splitext(file)[1] in PAYLOADS:
        with opened(file) as f:
            try:
                samples = payload(f, file, limit)[1]
            except RecordError as e:
                return None, [BadRow(file, 0, str(e).removeprefix(f"{file}: "), rows=0)]
        return pack([_wanted(row, detected) for row in samples], range(1, len(samples) + 1), file)
    rows, numbers, bad = objects(piece, limit)
    if not rows:
        return None, sorted(bad, key=lambda b: b.row)
    if kind.adapt:
        translated, numbers, strange = adapted(rows, numbers, detected, file)
        bad += strange
    else:
        names = kind.resolve(set().union(*rows), mapped)
        translated = [{name: look_up(row, column) for name, column in names.items()} for row in rows]
        if kind.amend:
            translated = [_wanted(row, detected) for row in map(function(kind.amend), rows, translated)]
    columns, wrong = pack(translated, numbers, file)
    return columns, sorted([*bad, *wrong], key=lambda b: b.row)


def objects(piece: Piece, limit: int) -> tuple[Sequence[Row], Sequence[int], list[BadRow]]:
    """Rows of a piece as objects, the number of each, and what cannot be read."""
    file, start, stop = piece.file, piece.start, piece.stop
    if file.endswith(".parquet"):
        from offdrift.records.readers import parquet

        tables, bad = parquet.read_objects(file, start, stop, limit)
        rows = [row for _, part in tables for row in part]
        return rows, [first + i for first, part in tables for i in range(len(part))], bad
    if file.endswith(files.TABLE):
        from offdrift.records.readers.csv_rows import rows_of_table

        try:
            with opened(file) as f:
                rows = rows_of_table(f, limit)
        except RecordError as e:
            return [], [], [BadRow(file, 0, str(e), rows=0)]
        return rows, range(1, len(rows) + 1), []
    from offdrift.records.readers import jsonl

    data, long, stopped = jsonl.read_lines(file, start, stop, limit)
    rows, numbers, bad = jsonl.decode(data, piece.first_row, file, limit)
    bad += [BadRow(file, piece.first_row + i, why) for i, why in long.items()]
    if stopped is not None:
        bad.append(BadRow(file, piece.first_row + data.count(b"\n"), stopped, rows=0))
    return rows, numbers, bad


def adapted(
    rows: Sequence[Row], numbers: Sequence[int], detected: Detected, file: str
) -> tuple[list[Row], list[int], list[BadRow]]:
    """Rows of a framework's own layout in the plain schema, with the number of the row that each comes from.

    Returns: also the rows that are not what the framework writes.
    """
    kind = source(detected.format)
    adapt, translated, origins, bad = function(kind.adapt), [], [], []
    mapped = {n: c for n, c in detected.columns.items() if n in PER_ROW and kind.columns.get(n) != c}
    if kind.step_in_row and kind.step(file) is None:
        mapped = {"step": kind.step_in_row, **mapped}
    for row, number in zip(rows, numbers, strict=True):
        try:
            per_row = {name: look_up(row, column) for name, column in mapped.items()}
            inside = adapt(row)
            inside = inside if isinstance(inside, list) else [inside]
            translated += [_wanted({**r, **per_row}, detected) for r in inside]
            origins += [number] * len(inside)
        except Malformed as e:
            bad.append(BadRow(file, number, f"no row of {kind.what}: {repr(e)[:200]}"))
    return translated, origins, bad


def payload(file: Bytes, name: str, limit: int, *, rows: bool = True) -> tuple[Source, list[Row]]:
    """The kind of log that a file of `torch.save` or a pickle is, by its name's suffix, and its rows if wanted.

    A list that is repeated in many rows counts against `limit` in each of them.

    Raises: `RecordError` naming the file, whatever is wrong with it.
    """
    load = function(PAYLOADS[os.path.splitext(name)[1]])
    budget = Budget(limit)
    kept: list[Row] = []
    try:
        kind, samples = load(file, limit)
        for row in samples if rows else ():
            budget.spend(files.PLANNED * sum(len(x) for x in row.values() if hasattr(x, "__len__")))
            kept.append(row)
    except RecordError as e:
        raise type(e)(f"{name}: {e}") from e
    # Hostile or damaged bytes make an unpickler raise anything.
    except Exception as e:
        raise RecordError(f"{name} is damaged, or no log: {repr(e)[:200]}") from e
    return kind, kept


def look_up(row: Mapping[str, Any], name: str) -> Any:
    """A value by its key, or by dotted keys into objects; None if it is not there."""
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _wanted(row: Row, detected: Detected) -> Row:
    """A row without the fields that are not to be read."""
    return {name: x for name, x in row.items() if name not in detected.without} if detected.without else row


HEAD = 1 << 20
"""Bytes that a first look reads of a JSONL file; more if its first line is longer."""

BESIDE = "|".join((
    r"/eval-rollout/",
    r"(^|/)(rollout_)?eval_[^/]*$",
    r"(^|/)[^/]*_metadata\.jsonl$",
    r"(^|/)val_data_step\d+\.jsonl$",
    r"/rollouts/step_\d+/(eval/.*|train/all)/traces\.jsonl$",
    r"(^|/)policy_loss_debug/[^/]*$",
))  # fmt: skip
"""Files that lie beside logs and are none: evaluations, open-instruct's description of a run, prime-rl's episodes that
never trained, miles' single calls of its loss."""

ELSEWHERE: Mapping[str, str] = MappingProxyType({
    r"val_data_step\d+\.jsonl$": "NeMo-RL's training data is train_data_stepN.jsonl, which its "
    "single controller (asynchronous, with data_plane.enabled) does not write: record the loss's "
    "tokens, nemo_rl.install(METHOD, record=FOLDER)",
})  # fmt: skip
"""What to do where only what lies beside a log is there."""

NAMED = 8
"""Unused columns that a message names."""

LISTED = 60
"""Columns of a file that a message names."""

TRIED = 8
"""Files of one shape of name that are looked at until one can be read."""

NOTHING: Mapping[str, str] = MappingProxyType({})


class Look(NamedTuple):
    """Columns and format that a first look at a file suggests."""

    names: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    """Dotted names inside objects."""
    numeric: tuple[str, ...] = ()
    """Of both, those that hold numbers or lists of numbers."""
    single: tuple[str, ...] = ()
    """Of both, those that hold no list in any row; of JSON, where no schema tells."""
    unnamed: tuple[str, ...] = ()
    """Of both, those whose lists may be log-probs of responses, of JSON and tables."""
    source: Source | None = None
    """Kind of log, where it is recognized without looking at the names."""
    framework: str | None = None
    """As a header states it."""
    schema: pa.Schema | None = None
    """Of Parquet."""


class _Matches(NamedTuple):
    """Files of one kind of log."""

    source: Source
    first: Look
    files: list[str]


class _Unknown(NamedTuple):
    """Files that are not read."""

    files: list[str]
    why: str
    damaged: bool
    """It cannot be read at all, as opposed to holding something else."""
    refused: bool = False
    """Its format is known, and its content is not to be read."""
    unmapped: bool = False
    """It holds no column of the name that a field is to be read from."""
    unnamed: tuple[str, ...] = ()
    """Its columns whose lists may be log-probs, under names that tell nothing."""


class UnnamedColumnsError(RecordError):
    """Logs of tokens whose columns have names that do not tell what they are."""

    def __init__(self, message: str, files: Sequence[str]) -> None:
        super().__init__(message)
        self.files = frozenset(files)


def look(file: str, limit: int = LIMIT) -> Look:
    """A first look at a file; `RecordError` if it cannot be read as what its name says."""
    try:
        if file.endswith(".parquet"):
            return _look_at_parquet(file)
        if os.path.splitext(file)[1] in PAYLOADS:
            with opened(file) as f:
                return Look(source=payload(f, file, limit, rows=False)[0])
        if file.endswith(files.TABLE):
            from offdrift.records.readers.csv_rows import head_of_table

            with opened(file) as f:
                return _look_at_rows(head_of_table(f, limit))
        return _look_at_rows(rows_of_head(file, limit))
    except (OSError, MemoryError) as e:
        raise missing(file, e) from e


def _look_at_parquet(file: str) -> Look:
    import pyarrow as pa

    from offdrift.records.readers import parquet

    schema = parquet.schema(file)
    names = tuple(schema.names)
    inner = tuple(
        f"{f.name}.{f.type.field(i).name}"
        for f in schema
        if pa.types.is_struct(f.type)
        for i in range(f.type.num_fields)
    )

    def of_numbers(name: str) -> bool:
        kind = parquet.type_of(schema, name)
        if kind is None or pa.types.is_null(kind):
            return False
        return parquet.is_number(kind.value_type if parquet.is_list(kind) else kind)

    numeric = tuple(filter(of_numbers, (*names, *inner)))
    metadata = schema.metadata or {}
    source, framework = OWN_ROLLOUTS if ROLLOUTS_KEY in metadata else None, None
    if LOG_KEY in metadata:
        try:
            header = json.loads(metadata[LOG_KEY])
        except ValueError:
            header = None
        if isinstance(header, dict):
            source, framework = OWN, header.get("framework")
    framework = framework if isinstance(framework, str) else None
    return Look(names, inner, numeric, source=source, framework=framework, schema=schema)


def rows_of_head(file: str, limit: int) -> list[Row]:
    """Rows among the first bytes of a file of JSON lines: of `HEAD` bytes, or of as many as the first row takes.

    Raises: `RecordError` where there are lines, and none of them is a row.
    """
    from offdrift.records.readers import jsonl

    size = HEAD
    while True:
        data, long, stopped = jsonl.read_lines(file, 0, size, limit)
        end = len(data) if len(data) < size else data.rfind(b"\n") + 1
        rows, _, bad = jsonl.decode(data[:end], 1, file, limit)
        if rows or (len(data) < size and not long) or size > 8 * limit // files.LINES:
            break
        size *= 8
    stopped = stopped or next(iter(long.values()), None)
    if not rows and (bad or stopped):
        why = stopped or f"line {bad[0].row}, {bad[0].reason}"
        raise RecordError(f"{file} holds no row that can be read: {why}")
    return [*rows]


def _look_at_rows(rows: Sequence[Row]) -> Look:
    names = dict.fromkeys(name for row in rows for name in row)
    inner = dict.fromkeys(
        f"{name}.{key}" for row in rows for name, value in row.items() if isinstance(value, Mapping) for key in value
    )

    def of_numbers(value: object) -> bool:
        values = value if isinstance(value, list) else [value]
        return len(values) > 0 and all(isinstance(x, int | float) for x in values)

    def no_number(value: object) -> bool:
        return value is None or isinstance(value, list)

    numeric = [n for n in (*names, *inner) if any(of_numbers(look_up(row, n)) for row in rows)]
    single = [n for n in (*names, *inner) if not any(no_number(look_up(row, n)) for row in rows)]
    unnamed = like_logprobs(rows, [n for n in (*names, *inner) if n not in single])
    return Look(tuple(names), tuple(inner), tuple(numeric), tuple(single), unnamed=unnamed)


def like_logprobs(rows: Sequence[Row], names: Sequence[str]) -> tuple[str, ...]:
    """Columns of lists that may be log-probs of a response each: no number above 0, and not all of them whole.

    As long as another of them in every row, or of lengths that differ: a few quantiles in each row are none.

    Example:
        >>> rows = [{"mu": [-0.5, -1.0], "pi": [-0.5, -1.25], "quantiles": [-3.0, -2.0, -0.5], "n": [-1, -2]}]
        >>> like_logprobs(rows, ["mu", "pi", "quantiles", "n"])
        ('mu', 'pi')
    """
    lengths: dict[str, tuple[int, ...]] = {}
    for name in names:
        lists = [x for row in rows if isinstance(x := look_up(row, name), list)]
        numbers = [v for x in lists for v in x if v is not None]
        in_range = all(isinstance(v, int | float) and not v > 0 for v in numbers)
        if in_range and any(isinstance(v, float) and v == v and v % 1 for v in numbers):
            lengths[name] = tuple(map(len, lists))
    every = list(lengths.values())
    return tuple(name for name, own in lengths.items() if len(set(own)) > 1 or every.count(own) > 1)


def detect(paths: Sequence[str], *, columns: Mapping[str, str] = NOTHING, limit: int = LIMIT) -> Detected:
    """Find the logs that paths name, and tell what they are.

    Args:
        paths: files, folders, globs, or URLs of any store that fsspec knows.
        columns: column of the log by field, where it has a name of its own; dots lead into objects; "" for a field
            that is not to be read.
        limit: bytes that one file may take in memory, or decompress to. A file that takes more is left out when it
            is read, and reported.

    Raises: `RecordError` if a path leads nowhere, nothing there is a log, a field of `columns` is none, or a mapped
        column is not in the log.

    Example:
        >>> detect(["run/logs"])  # doctest: +SKIP
        Detected(format='plain', framework='offdrift', files=('run/logs/1.parquet', ...
    """
    mapped, without = by_field(columns)
    there, unreadable = files.find(paths)
    named, repeated = files.unrepeated(there)
    beside = {f for f in named if f not in paths and re.search(BESIDE, f)}
    candidates = [f for f in named if f not in beside]
    kinds, unknown = _kinds(candidates, mapped, limit)
    if not kinds:
        message, unnamed = _no_log(named, unknown, unreadable), [f for u in unknown if u.unnamed for f in u.files]
        raise UnnamedColumnsError(message, unnamed) if unnamed else RecordError(message)
    best = min(kinds, key=lambda k: rank(k.source, _columns(k, mapped)))
    # What cannot be read may well be one of these, damaged: the reader will say so, file by file.
    suffix = best.files[0].rsplit(".")[-1]
    damaged = [u for u in unknown if u.damaged and u.files[0].endswith(suffix)]
    unknown = [u for u in unknown if u not in damaged]
    chosen = {*best.files, *(f for u in damaged for f in u.files)}
    read = [f for f in candidates if f in chosen]
    of_ranks: tuple[str, ...] = ()
    if best.source.distinct:
        distinct = function(best.source.distinct)(read, limit)
        of_ranks = tuple(f for f in read if f not in set(distinct))
        read = distinct
    best = best._replace(files=read)
    resolved = {n: c for n, c in _resolved(best, mapped).items() if n not in without}
    proposed = _other_policy(best, resolved)
    return Detected(
        format=best.source.format,
        framework=best.first.framework or best.source.framework,
        files=tuple(read),
        description=_sentence(
            best,
            kinds,
            unknown,
            beside=len(beside),
            columns=resolved,
            repeated=repeated,
            of_ranks=len(of_ranks),
            unreadable=unreadable,
            proposed=proposed,
        ),
        columns=resolved,
        sizes=tuple(files.size(f) for f in read),
        skipped=tuple(unreadable),
        repeats=of_ranks,
        limit=limit,
        without=without,
        proposed=proposed,
    )


def by_field(columns: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Columns that a caller mapped, by the field's own name, and the fields that are not to be read.

    Raises: `RecordError` naming what is not a field.
    """
    fields = {other: name for name, f in COLUMNS.items() for other in f.spellings}
    asked = {fields.get(name, name): column for name, column in columns.items()}
    for name in asked:
        if name not in COLUMNS:
            raise RecordError(f"columns: {name!r} is no field; the fields are {', '.join(COLUMNS)}")
    without = tuple(name for name, column in asked.items() if not column)
    return {name: column for name, column in asked.items() if column}, without


def _kinds(named: Sequence[str], mapped: Mapping[str, str], limit: int) -> tuple[list[_Matches], list[_Unknown]]:
    """Files by kind, told from one file of every shape of name; and why others are no log."""
    shapes: dict[str, list[str]] = {}
    for file in named:
        shapes.setdefault(re.sub(r"\d+", "#", file), []).append(file)
    kinds: list[_Matches] = []
    unknown: list[_Unknown] = []
    for alike in shapes.values():
        first = why = None
        for file in alike[:TRIED]:
            try:
                first = look(file, limit)
            except OffdriftError as e:
                why = why or e
                continue
            if first.names or first.source:
                break
        if first is None:
            refused = isinstance(why, NotRead)
            unknown.append(_Unknown(alike, str(why), not refused, refused))
            continue
        source = first.source or source_of(first.names)
        if mapped and set(mapped.values()) <= {*first.names, *first.inner}:
            source = source or PLAIN
        if source is None:
            absent = _absent(first, mapped)
            why_not = _not_there(alike[0], first, absent) if absent else f"{alike[0]} holds {_held(first) or 'nothing'}"
            unknown.append(_Unknown(alike, why_not, False, unmapped=bool(absent), unnamed=first.unnamed))
            continue
        same = next((k for k in kinds if k.source is source), None)
        if same is None:
            kinds.append(_Matches(source, first, list(alike)))
        else:
            same.files.extend(alike)
    return kinds, unknown


def _columns(kind: _Matches, mapped: Mapping[str, str]) -> dict[str, str]:
    """Column by field, as far as names tell."""
    if kind.source.adapt or not kind.first.names:
        return {**kind.source.columns, **mapped}
    return kind.source.resolve((*kind.first.names, *kind.first.inner), mapped)


def _resolved(best: _Matches, mapped: Mapping[str, str]) -> dict[str, str]:
    """Column by field, of columns that can hold the field.

    Raises: `RecordError` for a mapped column that is not there, or cannot.
    """
    first, columns = best.first, _columns(best, mapped)
    if best.source.adapt or not first.names:
        aligned = [name for name in mapped if name not in PER_ROW]
        if aligned or (mapped and not first.names):
            raise RecordError(
                f"columns: {', '.join(aligned or mapped)} cannot be mapped in {best.source.what}, "
                "which are read by their own layout; convert the log to the plain schema"
            )
        return columns
    for name, column in mapped.items():
        if name in LISTS and column in first.single:
            raise RecordError(
                f"columns: {name}={column}, but {column} holds one value per row, and {name} is a "
                f"list with one per token; leave it out, or --columns {name}= if it has that name"
            )
    if absent := _absent(first, mapped):
        raise RecordError(_not_there(best.files[0], first, absent))
    if first.schema is None:
        return {name: c for name, c in columns.items() if not (name in LISTS and c in first.single)}
    from offdrift.records.readers import parquet

    readable = parquet.present(first.schema, columns)
    for name in mapped.keys() - readable.keys():
        kind = parquet.type_of(first.schema, mapped[name])
        raise RecordError(f"columns: {name}={mapped[name]}, but that column is {kind}")
    return with_reward(readable, first.schema) if best.source is TRL else readable


def with_reward(columns: dict[str, str], schema: pa.Schema) -> dict[str, str]:
    """Columns of a log of TRL with the reward: the column of the reward function, if there is one alone.

    Each function's rewards stand under its name; the weights are not logged.
    """
    if "reward" in columns:
        return columns
    from offdrift.records.readers.parquet import is_number

    rewards = [f.name for f in schema if is_number(f.type) and f.name not in columns.values()]
    return {**columns, "reward": rewards[0]} if len(rewards) == 1 else columns


def _absent(first: Look, mapped: Mapping[str, str]) -> dict[str, str]:
    """Mapped columns that a file does not hold, by field."""
    return {name: column for name, column in mapped.items() if column not in {*first.names, *first.inner}}


def _held(first: Look) -> str:
    """Columns of a file, those inside objects by their dotted names."""
    objects = {name.partition(".")[0] for name in first.inner}
    names = [name[:60] for name in (*(n for n in first.names if n not in objects), *first.inner)]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _not_there(file: str, first: Look, absent: Mapping[str, str]) -> str:
    """The message for mapped columns that a file does not hold."""
    asked = ", ".join(f"{name}={column}" for name, column in absent.items())
    return f"columns: {asked}, but {file} has no {' and no '.join(absent.values())}; it has {_held(first)}"


def _no_log(named: Sequence[str], unknown: Sequence[_Unknown], unreadable: Sequence[BadRow]) -> str:
    """The message where no file is a log."""
    if not named and unreadable:
        return f"no log that can be read: {unreadable[0].file}: {unreadable[0].reason}"
    if not unknown:
        hint = next((h for p, h in ELSEWHERE.items() if any(re.search(p, f) for f in named)), "")
        evaluation = f"{_files(len(named))} of evaluation or metadata, no log; the first is {named[0]}"
        return f"{evaluation}. {hint}".rstrip(". ")
    why = unknown[0].why.rstrip(". ")
    if all(u.refused for u in unknown):
        return f"no log that can be read: {why}"
    if wrong := [u for u in unknown if u.unmapped]:
        return wrong[0].why
    if re.search("it was (refused|not run)$", why):
        return (
            f"no log that can be read: {why}. Save tensors, numbers, texts, lists and dicts alone, "
            "or write the plain schema of docs/logs.md"
        )
    if all(u.damaged for u in unknown):
        return f"no log that can be read: {why}. Copy or write the file again, or leave it out"
    if first := next((u for u in unknown if u.unnamed), None):
        mu, *others = first.unnamed
        columns = ",".join([f"logp_rollout={mu}", *(f"logp_old={pi}" for pi in others[:1])])
        whose = f"the engine that sampled gave {mu}" + "".join(f" and the trainer {pi}" for pi in others[:1])
        return (
            f"no log that is known: {first.why.rstrip('. ')}. {', '.join(first.unnamed[:4])} may be log-probs of "
            f"tokens; say whose, such as --columns {columns} if {whose}; docs/logs.md has the fields"
        )
    return (
        f"no log that is known: {why}. Map the columns of another log, such "
        "as --columns logp_rollout=NAME,logp=NAME; docs/logs.md has the fields"
    )


def _files(n: int) -> str:
    return f"{n} file{'' if n == 1 else 's'}"


def _other_policy(best: _Matches, columns: Mapping[str, str]) -> tuple[str, str] | None:
    """Propose a field and a column for the second policy, where one is read and a column may be another's."""
    if best.source.adapt:
        return None
    unused, lists = _unused(best, columns), best.first.unnamed
    known = [name for name in POLICIES if name in columns]
    others = [name for name in unused if name in lists or re.search(r"log_?p(rob)?s?\b", name)]
    if len(known) != 1 or not others:
        return None
    return "logp_old" if known == ["logp_rollout"] else "logp_rollout", others[0]


def _unused(best: _Matches, columns: Mapping[str, str]) -> list[str]:
    """Columns of numbers that no field is read from."""
    return [name[:60] for name in best.first.numeric if name not in columns.values()]


def _sentence(
    best: _Matches,
    kinds: Sequence[_Matches],
    unknown: Sequence[_Unknown],
    beside: int,
    columns: Mapping[str, str],
    repeated: int,
    of_ranks: int,
    unreadable: Sequence[BadRow],
    proposed: tuple[str, str] | None,
) -> str:
    """Describe the detected format, the columns that are read, and the files that are not."""
    parts = [f"Detected format: {best.source.what} (recognized by {best.source.because})"]
    if renamed := [f"{name} from {column}" for name, column in columns.items() if name != column]:
        parts.append("reading " + ", ".join(renamed))
    if best.source.note:
        parts.append(best.source.note)
    unused = _unused(best, columns)
    if unused and not best.source.adapt:
        more = f" and {len(unused) - NAMED} more" if len(unused) > NAMED else ""
        parts.append(f"not used: {', '.join(unused[:NAMED])}{more}; map with --columns")
    if proposed:
        whose = "the trainer's" if proposed[0] == "logp_old" else "the engine's"
        parts.append(f"{proposed[1]} may be {whose} log-probs: --columns {'='.join(proposed)}")
    parts += [f"not reading {_files(len(k.files))} of {k.source.what}" for k in kinds if k.source is not best.source]
    parts += [f"not reading {_files(len(u.files))} ({u.why})" for u in unknown if u.refused]
    if strange := [u.files[0] for u in unknown if not u.refused]:
        parts.append(f"not reading {', '.join(strange[:3])}, whose format is unknown")
    if beside:
        parts.append(f"not reading {_files(beside)} of evaluation or metadata")
    if repeated:
        parts.append(f"{_files(repeated)} named again by another path, counted once")
    if of_ranks:
        parts.append(f"not reading {_files(of_ranks)} of ranks that hold the samples of another rank")
    if unreadable:
        names = ", ".join(f"{b.file} ({b.reason})" for b in unreadable[:3])
        parts.append(f"{_files(len(unreadable))} cannot be read: {names}")
    return "; ".join(parts)
