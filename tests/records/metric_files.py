"""Files of metrics as their writers write them: the real ones where they are installed, else by the format."""

import csv
import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

Rows = Sequence[Mapping[str, float | int]]
STEPS = 12
VERL: Rows = [
    {
        "rollout_corr/kl": 0.01 * i,
        "rollout_corr/k3_kl": 0.02,
        "actor/grad_norm": math.nan if i == 3 else 0.25,
        "critic/score/mean": 0.5,
        "timing_s/gen": 3.0,
        "step": i,
    }
    for i in range(STEPS)
]
"""Metrics of verl, step by step."""


def write_lines(folder: Path, rows: Rows = VERL) -> Path:
    """Flat rows of JSON lines."""
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_verl(folder: Path, rows: Rows = VERL) -> Path:
    """By verl's own file logger."""
    tracking = pytest.importorskip("verl.utils.tracking")
    file = folder / "run.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_FILE_LOGGER_PATH", str(file))
        logger = tracking.FileLogger("project", "run")
        for row in rows:
            logger.log({k: v for k, v in row.items() if k != "step"}, row["step"])
        logger.finish()
    return file


def write_console(folder: Path, rows: Rows = VERL) -> Path:
    """By verl's own formatting of what it prints, behind Ray's prefix and among other lines."""
    aggregate = pytest.importorskip("verl.utils.logger.aggregate_logger")
    numpy = pytest.importorskip("numpy")
    lines = ["INFO: step:1 is not a row", "Training Progress:  10%"]
    for row in rows:
        numbers = {k: numpy.float64(v) if k.startswith("critic") else v for k, v in row.items() if k != "step"}
        lines.append("\x1b[36m(TaskRunner pid=7)\x1b[0m " + aggregate.concat_dict_to_str(numbers, row["step"]))
    file = folder / "train.log"
    file.write_text("\n".join(lines) + "\n")
    return file


def write_events(folder: Path, rows: Rows = VERL) -> Path:
    """By torch's SummaryWriter, as verl and slime use it."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(str(folder))
    for row in rows:
        for name, value in row.items():
            if name != "step":
                writer.add_scalar(name, value, int(row["step"]), new_style=name.startswith("critic"))
    writer.close()
    (file,) = folder.glob("events.out.tfevents.*")
    return file


def write_csv(folder: Path, rows: Rows = VERL) -> Path:
    """As pandas writes the history that the W&B API gives."""
    file = folder / "history.csv"
    names = dict.fromkeys(name for row in rows for name in row)
    with file.open("w", newline="") as f:
        writer = csv.DictWriter(f, ["_step", *(n for n in names if n != "step")])
        writer.writeheader()
        writer.writerows({("_step" if k == "step" else k): v for k, v in row.items()} for row in rows)
    return file


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(*fields: tuple[int, bytes | int]) -> bytes:
    """A protobuf message of texts, messages and numbers."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def wandb_record(row: Mapping[str, float | int], *, nested: bool = True) -> bytes:
    """What `wandb.log(row)` is in a run file."""
    items = [
        (1, message((2 if nested else 1, name.encode()), (16, json.dumps(value).encode())))
        for name, value in row.items()
        if name != "step"
    ]
    return message((1, 7), (2, message(*items, (2, message((1, int(row["step"])))))))


def wandb_file(messages: Sequence[bytes]) -> bytes:
    """A run file of W&B: LevelDB's log format with a header."""
    out = bytearray(struct.pack("<4sHB", b":W&B", 0xBEE1, 0))
    for whole in messages:
        rest, first = whole, True
        while True:
            room = 32768 - len(out) % 32768
            if room < 7:
                out += bytes(room)
                continue
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = (1 if first else 4) if not rest else (2 if first else 3)
            out += struct.pack("<IHB", zlib.crc32(part, zlib.crc32(bytes([kind]))), len(part), kind) + part
            first = False
            if not rest:
                break
    return bytes(out)


def write_wandb(folder: Path, rows: Rows = VERL) -> Path:
    """A run file with what else stands in one: a header, a console's line, a table that spans blocks."""
    long = message((2, message((1, message((1, b"table"), (16, json.dumps({"x": "y" * 70_000}).encode()))))))
    others = [message((21, b"")), message((4, message((3, b"hello")))), long]
    file = folder / "run-abc.wandb"
    file.write_bytes(wandb_file([*others, *(wandb_record(row, nested=i % 2 == 0) for i, row in enumerate(rows))]))
    return file


WRITERS: dict[str, Callable[..., Path]] = {
    "JSON lines": write_lines,
    "verl's file logger": write_verl,
    "verl's console": write_console,
    "TensorBoard": write_events,
    "CSV": write_csv,
    "W&B run": write_wandb,
}
