"""Fresh answers of two policies, read from files and shown: prompts and rewards alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from offdrift.certificate.paired import Answers, PairedCertificate
from offdrift.errors import RecordError
from offdrift.prove.certify import number
from offdrift.records.store import read_clusters, read_drawn_by, read_prompts, read_rewards, read_rows
from offdrift.texts import LARGEST_DATA, parse_json, read_bytes, text_id

ENDINGS = (".parquet", ".jsonl")


def answer_files(path: Path) -> list[Path]:
    """The files of one policy's answers: a .parquet or .jsonl file, a folder of them, or an arm of a run.

    Raises: `RecordError` if there is none.
    """
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    files = sorted(f for f in folder.iterdir() if f.suffix in ENDINGS) if folder.is_dir() else [folder]
    if not files or not files[0].is_file() or files[0].suffix not in ENDINGS:
        raise RecordError(f"{path} holds no answers; give a .parquet or .jsonl file, or a folder of them")
    return files


def read_answers(path: Path, *, cluster: str | None = None) -> Answers:
    """The answers of one policy: rollouts of this library, or rows with "prompt" and "reward".

    A row's "group_id" tells draws of one prompt apart, within a file; without, nobody knows which rows answer one draw.

    Args:
        path: as `answer_files`.
        cluster: column that names what prompts share.

    Raises: `RecordError` naming the file for what cannot be read, rows without a prompt or a finite reward, several
        policies, and prompts that were chosen by rewards.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    versions: set[int] = set()
    before, grouped = 0, True
    for file in answer_files(path):
        prompts, groups, rewards, clusters, (of_file, drawn_by) = _rows(file, cluster)
        versions.update(drawn_by)
        grouped &= of_file
        _, numbered = np.unique(groups, return_inverse=True)
        parts.append((prompts, numbered + before, rewards, clusters))
        before += len(groups)
    if len(versions) > 1:
        raise RecordError(
            f"{path} holds answers of several weights (versions {sorted(versions)}); name the files of one policy"
        )
    columns = [np.concatenate(x) for x in zip(*parts, strict=True)]
    return Answers(*columns[:3], clusters=None if cluster is None else columns[3], grouped=grouped)


Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, tuple[bool, list[int]]]


def _rows(file: Path, cluster: str | None) -> Rows:
    """Keys of prompts, groups, rewards and clusters of a file's rows, whether they name their groups, and the versions
    of the weights that drew."""
    if file.suffix == ".parquet":
        rows = read_rows(file, ["prompt", "reward", "group_id", *([] if cluster is None else [cluster])])
        if rows is None:
            return _of_rollouts(file, cluster)
    else:
        try:
            lines = read_bytes(file, limit=LARGEST_DATA).splitlines()
            rows = [parse_json(line) for line in lines if line.strip()]
        except (OSError, ValueError) as e:
            raise RecordError(f"cannot read {file}: {e}") from e
    wanted = ("prompt", "reward", *(() if cluster is None else (cluster,)))
    for i, row in enumerate(rows, 1):
        missing = [name for name in wanted if not isinstance(row, Mapping) or row.get(name) is None]
        if missing:
            words = " and no ".join(missing)
            raise RecordError(f'{file}, row {i}: no {words}; write {{"prompt": ..., "reward": ...}}')
        if not isinstance(row["reward"], bool | int | float) or not np.isfinite(row["reward"]):
            raise RecordError(f"{file}, row {i}: reward = {row['reward']!r} is no finite number")
    keys = [_key(row["prompt"]) for row in rows]
    draws = [key if row.get("group_id") is None else _key([key, row["group_id"]]) for key, row in zip(keys, rows)]
    return (
        np.array(keys, dtype=np.int64),
        np.array(draws, dtype=np.int64),
        np.array([float(row["reward"]) for row in rows]),
        np.array([0 if cluster is None else text_id(str(row[cluster])) for row in rows], dtype=np.int64),
        (all(row.get("group_id") is not None for row in rows), []),
    )


def _of_rollouts(file: Path, cluster: str | None) -> Rows:
    provenance, versions = read_drawn_by(file)
    if provenance.selected:
        raise RecordError(
            f"{file}: prompts or group sizes were chosen by the rewards of the responses, or by how long they took; so "
            "they are no independent sample. Draw answers without either"
        )
    prompts, groups = (x.numpy() for x in read_prompts(file))
    named = np.zeros(len(prompts), dtype=np.int64) if cluster is None else read_clusters(file, cluster).numpy()
    return prompts, groups, read_rewards(file).double().numpy(), named, (True, versions)


def _key(prompt: Any) -> int:
    """A number that equal prompts share: texts, or lists of messages."""
    return text_id(prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True))


def paired_view(proof: PairedCertificate, names: Sequence[str], *, width: int = 100) -> RenderableType:
    """The verdict, and both policies side by side."""
    table = Table(box=box.SIMPLE_HEAD, title="fresh answers of both policies", title_justify="left")
    table.add_column("")
    for name in ("mean", "low", "answers"):
        table.add_column(name, justify="right", no_wrap=True)
    for letter, name, mean, answers in zip("AB", names, proof.rewards, proof.answers, strict=True):
        table.add_row(Text(f"J({letter}), {name}"), number(mean), "", f"{answers:,}")
    table.add_row("J(B) - J(A)", number(proof.gain.mean), number(proof.gain.low), "")
    color = "green" if proof.certified else "yellow"
    return Group(Panel(Text(proof.verdict), title="certificate", border_style=color, width=min(width, 110)), table)
