"""Rollouts on disk: one Parquet file per batch, written whole or not at all, read without copies.

One row per sequence; token-valued columns are Arrow lists, whose flat value buffer *is* the packed stream and whose
offsets *are* `cu_seqlens`. Provenance and format version are JSON in the schema's metadata. Nothing is unpickled.

The output head that hidden states belong to is far larger than the states of a batch, and often the same for many
batches. So it has a file of its own in `heads/` beside them, named by the SHA-256 of its bytes: equal heads are one
file, and a file whose content is not what its name says is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Integer
from torch import Tensor

from offdrift.divergence.head import Head
from offdrift.errors import RecordError
from offdrift.records.atomic import write_atomically
from offdrift.records.pages import decoded, row_groups
from offdrift.records.plausible import implausible
from offdrift.records.provenance import Provenance
from offdrift.records.rollouts import (
    Evidence,
    FullVocab,
    HiddenStates,
    Retention,
    Rollouts,
    Routes,
    Speculation,
    Support,
    TopK,
    Turns,
    cumulative,
    keys_of,
    text_id,
)
from offdrift.records.schema import LOG_KEY, ROLLOUTS_KEY
from offdrift.texts import LARGEST_DATA, check_file, parse_json, read_bytes

FORMAT = 4
READABLE = (1, 2, 3, FORMAT)
"""Format 2 adds hidden states, format 3 turns, format 4 supports, routes, teachers, retention and drafters; whatever
else a file of an earlier format holds is the same."""
KEY = ROLLOUTS_KEY

TOKEN_COLUMNS = {"tokens": pa.int32(), "logp_rollout": pa.float32(), "rollout_version": pa.int32()}
"""Per response token. `prompt_tokens` is cut by its own lengths; evidence is `width` per token."""
SPECULATION = {
    "origin": ("draft_origin", pa.int8()),
    "overlap": ("draft_overlap", pa.float32()),
    "drafter_version": ("drafter_version", pa.int32()),
}
"""Per response token, where a drafter proposed tokens: attribute, column and its type."""

NUMBERS = {
    "rewards": "reward",
    "greedy_rewards": "greedy_reward",
    "mix_alpha": "mix_alpha",
    "queue_seconds": "queue_seconds",
    "generation_seconds": "generation_seconds",
}
"""Per sequence, where they are known: attribute and column."""
TEXTS = {"prompts": "prompt", "completions": "completion", "workers": "worker"}
"""Per sequence, where they are known: attribute and column."""

COMPONENT = "reward/"
"""Before the name of a reward's component in a column's name."""

SUPPORT_LEAF = "support_ids.list.element"
"""Parquet's path of the ids of supports."""

STATES = {torch.float32: torch.float32, torch.float16: torch.float16, torch.bfloat16: torch.uint16}
"""Dtypes of hidden states, and what their bits are stored as: Arrow has no bfloat16."""


@dataclass(frozen=True)
class PartColumns:
    """Something that a batch may hold beside its tokens, and its columns."""

    sign: str
    """Column that tells whether a file holds it."""
    columns: Callable[[Any, Tensor], dict[str, pa.Array]]
    """Its columns, of it and the batch's `cu_seqlens`."""
    read: Callable[[pa.Table, Tensor], Any]
    """It, of a file's table and `cu_seqlens`; `ValueError` where its lengths are others than those of the tokens."""


def turn_columns(turns: Turns, offsets: Tensor) -> dict[str, pa.Array]:
    """Return the turn of each response token, and the tokens of each sequence's context with theirs."""
    context = {"context_tokens": turns.context_tokens, "context_ids": turns.context_ids}
    return {
        "turn_ids": _list(turns.ids, offsets, pa.int32()),
        **{name: _list(x, turns.context_cu_seqlens, pa.int32()) for name, x in context.items()},
    }


def read_turns(table: pa.Table, cu_seqlens: Tensor) -> Turns:
    """Return what `turn_columns` wrote."""
    ids, of_tokens = _stream(table, "turn_ids")
    context, cuts = _stream(table, "context_tokens")
    before, of_context = _stream(table, "context_ids")
    if not (torch.equal(of_tokens, cu_seqlens) and torch.equal(of_context, cuts)):
        raise ValueError("turn_ids or context_ids have other lengths than the tokens they are about")
    return Turns(ids, context, before, cuts)


def support_columns(support: Support, offsets: Tensor) -> dict[str, pa.Array]:
    """Return the number of ids at each response token, and the ids."""
    return {
        "support_counts": _list(support.cu_seqlens.diff(), offsets, pa.int32()),
        "support_ids": _list(support.ids, support.cu_seqlens[offsets], pa.int32()),
    }


def read_support(table: pa.Table, cu_seqlens: Tensor) -> Support:
    """Return what `support_columns` wrote."""
    counts, of_tokens = _stream(table, "support_counts")
    ids, cuts = _stream(table, "support_ids")
    support = Support(ids, cumulative(counts))
    if not (torch.equal(of_tokens, cu_seqlens) and torch.equal(cuts, support.cu_seqlens[cu_seqlens])):
        raise ValueError("support_counts or support_ids have other lengths than the tokens they are about")
    return support


def position_column(values: Integer[Tensor, "p layers width"], cuts: Tensor) -> pa.Array:
    """Return what is known at each position of the forward passes, prompts included, as one column."""
    _, layers, width = values.shape
    inner = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1).numpy()), width)
    return _cut(pa.FixedSizeListArray.from_arrays(inner, layers), cuts)


def read_positions(table: pa.Table, name: str, cu_seqlens: Tensor) -> tuple[Integer[Tensor, "p layers width"], Tensor]:
    """Return what `position_column` wrote, and its cuts."""
    chunk = table.column(name).chunk(0)
    layers, width = chunk.values.type.list_size, chunk.values.values.type.list_size
    cuts, of_prompts = _tensor(chunk.offsets), _stream(table, "prompt_tokens")[1]
    if not torch.equal(cuts, cu_seqlens + of_prompts - torch.arange(len(cuts))):
        raise ValueError(f"{name}: values do not cover every prompt, and every response but its last token")
    return _tensor(chunk.values.values.values).reshape(-1, layers, width), cuts


def read_speculation(table: pa.Table, cu_seqlens: Tensor) -> Speculation:
    """Return how each response token came about, of the columns of `SPECULATION`."""
    streams = {name: _stream(table, column) for name, (column, _) in SPECULATION.items()}
    if not all(torch.equal(cuts, cu_seqlens) for _, cuts in streams.values()):
        raise ValueError("what was proposed and tokens have different lengths")
    return Speculation(**{name: values for name, (values, _) in streams.items()})


PARTS = {
    "turns": PartColumns("turn_ids", turn_columns, read_turns),
    "routes": PartColumns(
        "routes",
        lambda x, _: {"routes": position_column(x.experts, x.cu_seqlens)},
        lambda table, cuts: Routes(*read_positions(table, "routes", cuts)),
    ),
    "mix_kl": PartColumns(
        "mix_kl",
        lambda x, offsets: {"mix_kl": _list(x, offsets, pa.float32())},
        lambda table, cuts: _per_token(table, "mix_kl", cuts),
    ),
    "retention": PartColumns(
        "kept_until",
        lambda x, _: {"kept_until": position_column(x.visible_until, x.cu_seqlens)},
        lambda table, cuts: Retention(*read_positions(table, "kept_until", cuts)),
    ),
    "support": PartColumns("support_ids", support_columns, read_support),
    "speculation": PartColumns(
        "draft_origin",
        lambda x, offsets: {c: _list(getattr(x, name), offsets, kind) for name, (c, kind) in SPECULATION.items()},
        read_speculation,
    ),
}
"""By attribute of `Rollouts`, in the order of their columns."""


def evidence_columns(
    evidence: Evidence | None, offsets: Tensor, path: Path
) -> tuple[dict[str, pa.Array], dict[str, Any]]:
    """Return the columns of the evidence and what the header says of it; write the head of states beside `path`.

    Raises: `RecordError` as `write`.
    """
    columns: dict[str, pa.Array] = {}
    stated: dict[str, Any] = {"kind": type(evidence).__name__, "width": 0}
    if isinstance(evidence, FullVocab | TopK):
        stated["width"] = width = evidence.logp.shape[1]
        columns["evidence_logp"] = _list(evidence.logp, offsets * width, pa.float32())
    if isinstance(evidence, TopK):
        columns["evidence_ids"] = _list(evidence.ids, offsets * stated["width"], pa.int32())
    elif isinstance(evidence, HiddenStates):
        states = evidence.states
        if states.dtype not in STATES:
            raise RecordError(
                f"cannot write {path}: hidden states of dtype {states.dtype}; the format knows "
                f"{', '.join(str(d).removeprefix('torch.') for d in STATES)}"
            )
        flat = pa.array(states.reshape(-1).view(STATES[states.dtype]).numpy())
        stated["width"] = states.shape[1]
        columns["evidence_states"] = _cut(pa.FixedSizeListArray.from_arrays(flat, states.shape[1]), offsets)
        stated["dtype"] = str(states.dtype).removeprefix("torch.")
        stated["head"] = write_head(evidence.head, path.parent)
    return columns, stated


def write(rollouts: Rollouts, path: str | os.PathLike[str]) -> Path:
    """Write a batch to `path`, atomically: a killed run leaves the old file or the new one.

    The head of hidden-state evidence goes into `heads/` beside it first, unless it is there.

    Raises: `RecordError` naming the file if the disk is full or the folder cannot be written, or if the hidden states
        have a dtype that no engine computes in.
    """
    path = Path(path)
    offsets, evidence = rollouts.cu_seqlens, rollouts.evidence
    columns: dict[str, pa.Array] = {
        name: _list(getattr(rollouts, name), offsets, kind) for name, kind in TOKEN_COLUMNS.items()
    }
    columns["prompt_tokens"] = _list(rollouts.prompt_tokens, rollouts.prompt_cu_seqlens, pa.int32())
    for name, part in PARTS.items():
        if (value := getattr(rollouts, name)) is not None:
            columns |= part.columns(value, offsets)
    columns["group_id"] = pa.array(rollouts.group_ids.numpy(), pa.int64())
    columns["finish"] = pa.array(rollouts.finish, pa.string())
    for name, column in NUMBERS.items():
        if (numbers := getattr(rollouts, name)) is not None:
            columns[column] = pa.array(numbers.numpy(), pa.float32())
    for name, values in (rollouts.components or {}).items():
        columns[COMPONENT + name] = pa.array(values.numpy(), pa.float32())
    for name, column in TEXTS.items():
        if (texts := getattr(rollouts, name)) is not None:
            # Model output may hold lone surrogates, which no Parquet string can.
            columns[column] = pa.array([t.encode("utf-8", "replace").decode() for t in texts], pa.string())
    of_evidence, stated = evidence_columns(evidence, offsets, path)
    columns |= of_evidence
    header = {"format": FORMAT, "provenance": asdict(rollouts.provenance), "evidence": stated}
    table = pa.table(columns).replace_schema_metadata({KEY: json.dumps(header).encode()})
    # Zstandard at level 1 halves token columns; log-probs hardly compress, whatever the level.
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "write_page_checksum": True}
    if rollouts.support is not None:
        # Ascending ids as differences: a third of the size, and below a bit per token of the vocabulary.
        leaves = [f"{name}.list.element" if isinstance(x, pa.LargeListArray) else name for name, x in columns.items()]
        options["use_dictionary"] = [leaf for leaf in leaves if leaf != SUPPORT_LEAF]
        options["column_encoding"] = {SUPPORT_LEAF: "DELTA_BINARY_PACKED"}
    write_atomically(path, lambda tmp: pq.write_table(table, tmp, **options))
    return path


def read(path: str | os.PathLike[str]) -> Rollouts:
    """Read a batch back; tensors share memory with the decoded Arrow buffers.

    Raises: `RecordError` naming the file if it, or the head it refers to, is missing, corrupt, or not one of ours.
    """
    path = Path(path)
    with _table(path) as (table, header):
        table = table.combine_chunks()
        known = set(table.column_names)
        cu_seqlens = _stream(table, "tokens")[1]
        streams: dict[str, Any] = {name: _per_token(table, name, cu_seqlens) for name in TOKEN_COLUMNS}
        parts = {name: part.read(table, cu_seqlens) for name, part in PARTS.items() if part.sign in known}
        components = {n.removeprefix(COMPONENT): n for n in table.column_names if n.startswith(COMPONENT)}
        optional: dict[str, Any] = {
            **{name: _tensor(table.column(column).chunk(0)) for name, column in NUMBERS.items() if column in known},
            **{name: tuple(table.column(column).to_pylist()) for name, column in TEXTS.items() if column in known},
        }
        evidence, tokens, logp = _evidence(table, header["evidence"], path), streams["tokens"], streams["logp_rollout"]
        prompt_tokens, prompt_cu_seqlens = _stream(table, "prompt_tokens")
        if (found := implausible(evidence, tokens, logp)) is not None:
            raise RecordError(
                f"{path}: token {found[0]}: {found[1]}; the recorded evidence is not that of one distribution. Draw "
                "the batch again"
            )
        return Rollouts(
            **streams,
            cu_seqlens=cu_seqlens,
            prompt_tokens=prompt_tokens,
            prompt_cu_seqlens=prompt_cu_seqlens,
            group_ids=_tensor(table.column("group_id").chunk(0)) if len(table) else torch.zeros(0).long(),
            finish=tuple(table.column("finish").to_pylist()),
            provenance=Provenance.from_text(json.dumps(header["provenance"])),
            evidence=evidence,
            components={n: _tensor(table.column(column).chunk(0)) for n, column in components.items()} or None,
            **parts,
            **optional,
        )


def read_drawn_by(path: str | os.PathLike[str]) -> tuple[Provenance, list[int]]:
    """Read a batch's provenance and the versions of the weights that sampled it, and little else.

    Raises: `RecordError` naming the file if it is missing, corrupt, or not one of ours.
    """
    with _table(Path(path), ["rollout_version"]) as (table, header):
        chunks = table.column("rollout_version").chunks
        versions = {v for chunk in chunks for v in chunk.flatten().unique().to_pylist()}
        return Provenance.from_text(json.dumps(header["provenance"])), sorted(versions)


def read_prompts(path: str | os.PathLike[str]) -> tuple[Tensor, Tensor]:
    """Return the key of each sequence's prompt (`Rollouts.prompt_keys`) and its group id; little else is read.

    Raises: `RecordError` naming the file if it is missing, corrupt, or not one of ours.
    """
    with _table(Path(path), ["prompt_tokens", "group_id"]) as (table, _):
        if not len(table):
            return torch.zeros(0).long(), torch.zeros(0).long()
        table = table.combine_chunks()
        return keys_of(*_stream(table, "prompt_tokens")), _tensor(table.column("group_id").chunk(0))


def read_rewards(path: str | os.PathLike[str]) -> Tensor:
    """Return the reward of each sequence, and read little else.

    Raises: `RecordError` naming the file if it has no rewards, is missing, corrupt, or not one of ours.
    """
    with _table(Path(path), ["reward"]) as (table, _):
        if "reward" not in table.column_names:
            raise RecordError(f"{path} has no rewards")
        return torch.tensor(table.column("reward").to_pylist(), dtype=torch.float32)


def read_rows(path: str | os.PathLike[str], columns: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return some columns of a Parquet file that is not ours, row by row, those that it has; None for one of ours.

    Raises: `RecordError` naming the file if it is missing or corrupt.
    """
    try:
        check_file(path)
        schema = pq.read_schema(path)
        if KEY in (schema.metadata or {}):
            return None
        return pq.read_table(path, columns=[name for name in columns if name in schema.names]).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as e:
        raise RecordError(f"cannot read {path}: {e}") from e


def read_clusters(path: str | os.PathLike[str], column: str) -> Tensor:
    """Return a key of each sequence's value in a column of texts or whole numbers, equal where values are, in any file.

    The column is one that you add to the file: `pyarrow.Table.append_column` keeps the header.

    Raises: `RecordError` naming the file if it has no such column, one of another kind, or missing values in it; and
        where the file is missing, corrupt, or not one of ours.
    """
    with _table(Path(path), [column]) as (table, _):
        if column not in table.column_names:
            raise RecordError(f"{path} has no column {column!r}; it has {', '.join(table.column_names)}")
        kind = table.column(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise RecordError(f"{path}: column {column!r} holds {kind}; a cluster is named by a text or a whole number")
        values = table.column(column).to_pylist()
        if None in values:
            raise RecordError(f"{path}: {values.count(None)} of {len(values)} sequences have no {column!r}; name all")
        return torch.tensor([text_id(str(v)) for v in values], dtype=torch.int64)


LARGEST, RATIO = 4 << 30, 128
"""Bytes that a file may decode to, or how many times what it takes on disk, if that is more."""

Malformed = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError, MemoryError)
"""What a header or columns raise that are not what this library writes."""


@contextmanager
def _table(path: Path, columns: list[str] | None = None) -> Iterator[tuple[pa.Table, dict[str, Any]]]:
    """A file's columns and header; a `RecordError` where the file or what is made of it is wrong."""
    try:
        check_file(path)
        with open(path, "rb") as file, pq.ParquetFile(path) as source:
            _check_decoded(source, file, path)
            whole = source.schema_arrow
        wanted = columns if columns and set(columns) <= set(whole.names) else None
        table = pq.read_table(path, memory_map=True, columns=wanted, page_checksum_verification=True)
    except RecordError:
        raise
    except (OSError, *Malformed, pa.ArrowException) as e:
        raise RecordError(
            f"cannot read {path}: {e}; the file is corrupt or incomplete. Delete it and draw the "
            "batch again, or restore it from a copy"
        ) from e
    metadata = table.schema.metadata or {}
    if KEY not in metadata:
        raise RecordError(f"{path} {_foreign(whole)}")
    try:
        header = parse_json(metadata[KEY])
        if header.get("format") not in READABLE:
            raise RecordError(
                f"{path} has record format {header.get('format')}, this version reads "
                f"{' and '.join(map(str, READABLE))}"
            )
        yield table, header
    except RecordError:
        raise
    except (*Malformed, pa.ArrowException) as e:
        raise RecordError(f"{path} does not hold what its header says: {repr(e)[:300]}") from e


def _foreign(schema: pa.Schema) -> str:
    """Describe a Parquet file that holds no rollouts, and name the command that can use it."""
    what = f"is a Parquet file, but not of this library (columns {schema.names[:8]})"
    if LOG_KEY in (schema.metadata or {}):
        what = (
            "is a log that `offdrift.record` wrote: it lacks the tokens of the prompts and the settings of sampling, "
            "so that no other policy can be scored. `offdrift train` writes rollouts that have them "
            "(arms/ARM/rollouts), and offdrift.records.store.write those of an engine of yours; `offdrift audit` reads "
            "this log"
        )
    if not {"prompt", "reward"} <= set(schema.names):
        return what
    return f"{what}. Its prompts and rewards are compared with another policy's by `certify A B --fresh`"


def _check_decoded(source: pq.ParquetFile, file: Any, path: Path) -> None:
    """Raise `RecordError` where a file decodes to far more than it takes: runs of equal values, by the billion."""
    groups = row_groups(file, source.metadata.num_columns)
    pages = [decoded(file, c, source.schema.column(i)) for group in groups for i, c in enumerate(group.columns)]
    size = sum(p.bytes for p in pages)
    if size > max(LARGEST, RATIO * sum(p.stored for p in pages)):
        raise RecordError(
            f"{path} decodes to {size / 2**20:,.0f} MiB, more than {RATIO} times what it takes on disk, "
            "which no batch that was drawn does; delete it and draw the batch again"
        )


def _list(values: Tensor, offsets: Tensor, kind: pa.DataType) -> pa.Array:
    return _cut(pa.array(values.reshape(-1).numpy()).cast(kind), offsets)


def _cut(values: pa.Array, offsets: Tensor) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offsets.to(torch.int64).numpy()), values)


def _evidence(table: pa.Table, stated: dict[str, Any], path: Path) -> Evidence | None:
    kind, width = stated["kind"], stated["width"]
    cu_seqlens = _stream(table, "tokens")[1]
    if kind == "NoneType":
        return None
    if kind == "HiddenStates":
        chunk, dtype = table.column("evidence_states").chunk(0), getattr(torch, stated["dtype"])
        if not torch.equal(_tensor(chunk.offsets), cu_seqlens):
            raise ValueError("evidence_states and tokens have different lengths")
        states = _tensor(chunk.values.values)
        if states.dtype != STATES[dtype] or chunk.values.type.list_size != width:
            raise ValueError(f"evidence_states does not hold {width} {stated['dtype']} per token")
        head = read_head(path.parent, stated["head"], wanted_by=path)
        if head.weight.shape[1] != width:
            raise ValueError(f"states of {width} numbers, but a head for {head.weight.shape[1]}")
        return HiddenStates(states.view(dtype).reshape(-1, width), head)
    values, offsets = _stream(table, "evidence_logp")
    if not torch.equal(offsets, cu_seqlens * width):
        raise ValueError(f"evidence_logp does not hold {width} values per token")
    if kind == "FullVocab":
        return FullVocab(values.reshape(-1, width))
    if kind == "TopK":
        return TopK(_stream(table, "evidence_ids")[0].reshape(-1, width), values.reshape(-1, width))
    raise ValueError(f"unknown evidence {kind!r}")


def _per_token(table: pa.Table, name: str, cu_seqlens: Tensor) -> Tensor:
    """The values of a list column with one for each response token."""
    values, cuts = _stream(table, name)
    if not torch.equal(cuts, cu_seqlens):
        raise ValueError(f"{name} and tokens have different lengths")
    return values


def _stream(table: pa.Table, name: str) -> tuple[Tensor, Tensor]:
    """A list column as its flat values and its cuts."""
    chunk = table.column(name).chunk(0)
    return _tensor(chunk.values), _tensor(chunk.offsets)


def _tensor(array: pa.Array) -> Tensor:
    """A null-free Arrow array as a tensor on the same memory (never written to in place)."""
    return torch.from_dlpack(array)


def delete(path: Path) -> int:
    """Delete a Parquet file, and its output head if it has one that no other file beside it refers to.

    Returns: the bytes freed.
    """

    def head_of(batch: Path) -> str | None:
        """The name of a file's head; None of what has none, is damaged, or names what `write_head` would not."""
        with suppress(OSError, pa.ArrowException, ValueError, AttributeError):
            header = parse_json((pq.read_schema(batch).metadata or {}).get(KEY, b"{}"))
            name = (header.get("evidence") or {}).get("head")
            return name if isinstance(name, str) and re.fullmatch(HEAD_NAME, name) else None
        return None

    head, freed = head_of(path), path.stat().st_size
    path.unlink()
    if head is not None and all(head_of(other) != head for other in path.parent.glob("*.parquet")):
        with suppress(FileNotFoundError):
            freed += _path(path.parent, head).stat().st_size
            _path(path.parent, head).unlink()
    return freed


FOLDER = "heads"
HEAD_NAME = "[0-9a-f]{64}"
"""A SHA-256: no name from a file's header becomes a path unless it is one."""
ROUNDING = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float16, torch.bfloat16)}
"""Dtypes that an engine's logits may have, by name."""


def write_head(head: Head, folder: Path) -> str:
    """Write a head under `folder`, unless it is there already; return its name, the SHA-256 of the file's bytes.

    Raises: `RecordError` naming the file if the disk is full or the folder cannot be written.
    """
    from safetensors.torch import save

    tensors = {"weight": head.weight.contiguous()}
    if head.bias is not None:
        tensors["bias"] = head.bias.contiguous()
    rounding = next((name for name, dtype in ROUNDING.items() if dtype == head.round_to), None)
    rest = {"scale": head.scale, "soft_cap": head.soft_cap, "round_to": rounding}
    # One key: the library writes several in an order of its own, and the name is the bytes' hash.
    data = save(tensors, metadata={"head": json.dumps(rest, sort_keys=True)})
    name = hashlib.sha256(data).hexdigest()
    path = _path(folder, name)
    if not path.exists() or path.stat().st_size != len(data):
        write_atomically(path, lambda tmp: Path(tmp).write_bytes(data))
    return name


def read_head(folder: Path, name: str, *, wanted_by: Path) -> Head:
    """Read back the head that `write_head` named, for the batch `wanted_by`, and check that it is the one written.

    Raises: `RecordError` naming both files if the head is missing or has other content.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    if not (isinstance(name, str) and re.fullmatch(HEAD_NAME, name)):
        raise RecordError(f"{wanted_by} names its output head {name!r}, which is no SHA-256")
    path = _path(folder, name)
    try:
        data = read_bytes(path, limit=LARGEST_DATA)
    except OSError as e:
        raise RecordError(
            f"cannot read {path} ({e.strerror}), the output head that {wanted_by} refers to; copy "
            f"the folder {FOLDER}/ together with the batches, or draw the batch again"
        ) from e
    if hashlib.sha256(data).hexdigest() != name:
        raise RecordError(
            f"{path}, the output head that {wanted_by} refers to, is corrupt: its content is not "
            "what its name says. Restore it from a copy, or draw the batch again"
        )
    try:
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        rest = parse_json(header["__metadata__"]["head"])
        rounding = None if rest["round_to"] is None else ROUNDING[rest["round_to"]]
        tensors = load(data)
        return Head(tensors["weight"], tensors.get("bias"), rest["scale"], rest["soft_cap"], rounding)
    except (SafetensorError, *Malformed) as e:
        raise RecordError(f"{path} does not hold an output head: {repr(e)[:300]}") from e


def _path(folder: Path, name: str) -> Path:
    return folder / FOLDER / f"{name}.safetensors"
