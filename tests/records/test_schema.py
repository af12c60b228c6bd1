"""One table of log fields: a row that is added to it arrives everywhere, and nothing else lists them."""

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import offdrift
from offdrift.records import schema
from offdrift.records.batch import Logged

ROOT = Path(__file__).parents[2]

NEW_ROWS = """
    margin: Float[Tensor, " n"] | None = _row(
        "token", "float32", "a new float per token", column="margins", spellings=("gap",)
    )
    expert: Int[Tensor, " n"] | None = _row("token", "int32", "a new integer per token")
    quality: Float[Tensor, " n"] | None = _row("token or sequence", "float32", "a new float per either")
    cost: Float[Tensor, " b"] | None = _row("sequence", "float32", "a new float per sequence")
    turns: Int[Tensor, " b"] | None = _row("sequence", "int8", "a new integer per sequence", column="num_turns")
    notes: tuple[str, ...] | None = _row("sequence", "string", "a new text", column="note", repr=False)
"""

FOLLOW_THE_ROWS = """
import inspect, json, runpy, sys, types
from pathlib import Path

import offdrift.records

source, root, folder = Path(sys.argv[1]).read_text(), Path(sys.argv[2]), Path(sys.argv[3])
schema = types.ModuleType("offdrift.records.schema")
sys.modules[schema.__name__] = offdrift.records.schema = schema
exec(compile(source, "schema.py", "exec"), schema.__dict__)

import pyarrow.parquet as pq
import torch

from offdrift.audit.tally import Tally
from offdrift.records.readers import detect, pieces, read
from offdrift.records.recorder import record

per_token = {"margin": "margins", "expert": "expert", "quality": "quality"}
new = {**per_token, "cost": "cost", "turns": "num_turns", "notes": "note"}
for name in new:
    assert name in inspect.signature(record).parameters, name
    assert f"{name}: per " in record.__doc__, name

logp = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -0.25, 0.0], [-1.5, -4.0, 0.0]])
mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
values = dict(
    margin=-logp, expert=(8 * logp).long(), quality=torch.tensor([0.5, 1.5, 2.5]),
    cost=[7.0, float("nan"), 9.0], turns=[4, 5, 6], notes=["x", "y", "z"],
)
record(folder / "log", step=1, logp_rollout=logp, logp=logp - 0.1, mask=mask, **values).close()
kept = logp[mask.bool()]
written = pq.read_table(*(folder / "log").glob("*.parquet"))
assert set(new.values()) <= set(written.column_names), written.column_names
assert str(written.schema.field("expert").type.value_type) == "int32"
assert str(written.schema.field("num_turns").type) == "int8"


def batch_of(path):
    found = detect([str(path)])
    [batch] = [b for piece in pieces(found) for b in read(piece, found).batches]
    return batch


def check(batch, first):
    tokens = slice(0 if first == 0 else 3, None)
    assert torch.equal(batch.margin, -kept[tokens])
    assert torch.equal(batch.expert, (8 * kept[tokens]).long())
    assert batch.quality.tolist() == [0.5, 0.5, 0.5, 1.5, 1.5, 2.5][tokens]
    assert str(batch.cost.tolist()) == str([7.0, float("nan"), 9.0][first:])
    assert batch.turns.tolist() == [4, 5, 6][first:]
    assert batch.notes == ("x", "y", "z")[first:]


batch = batch_of(folder / "log")
check(batch, 0)
check(batch.cut(1, 3), 1)
check(batch.select(torch.tensor([1, 2])), 1)
assert set(new) <= set(Tally.of(batch).as_dict()["has"])

# JSON lines, one column under another of its names, one row without the new fields.
rows = [
    {"step": 1, "logp_rollout": [-1.0, -2.0], "logp": [-1.1, -2.1], "gap": [1.0, 2.0], "num_turns": 3},
    {"step": 1, "logp_rollout": [-1.0], "logp": [-1.1]},
]
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
found = detect([str(folder / "rows.jsonl")])
whole, without = [b for piece in pieces(found) for b in read(piece, found).batches]
assert (whole.margin.tolist(), whole.turns.tolist()) == ([1.0, 2.0], [3])
assert (without.margin, without.turns, without.num_tokens) == (None, None, 1)

page = runpy.run_path(str(root / "docs" / "generate.py"))["PAGES"]["logs.md"]()
for column in new.values():
    assert f"| `{column}` | " in page, column
"""


def test_a_new_row_arrives_everywhere(tmp_path: Path) -> None:
    source = Path(schema.__file__).read_text(encoding="utf-8")
    (anchor,) = (line for line in source.splitlines(True) if line.startswith("    position: "))
    (tmp_path / "schema.py").write_text(source.replace(anchor, NEW_ROWS.lstrip("\n") + anchor))
    script = [sys.executable, "-c", FOLLOW_THE_ROWS]
    paths = [str(tmp_path / "schema.py"), str(ROOT), str(tmp_path)]
    result = subprocess.run([*script, *paths], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_types_of_a_batch_are_those_of_its_table() -> None:
    annotated = {f.name: str(f.type) for f in fields(schema.LogValues)}
    for f in schema.FIELDS:
        kind = "tuple[str" if f.is_text else ("Int" if f.is_whole else "Float")
        assert annotated[f.name].startswith(kind), f.name
        if not f.is_text:
            assert f"' {'n' if f.by_token else 'b'}'" in annotated[f.name], f.name


def test_a_batch_has_no_values_beside_the_table() -> None:
    own = {f.name for f in fields(Logged)} - {f.name for f in schema.FIELDS}
    assert own == {"cu_seqlens", "length_unit", "divergences", "unscored"}


def test_no_name_means_two_fields() -> None:
    names = [name for column, f in schema.COLUMNS.items() for name in (column, *f.spellings)]
    assert len(names) == len(set(names))


def test_record_refuses_a_field_that_is_not_in_the_table(tmp_path: Path) -> None:
    parameters = inspect.signature(offdrift.record).parameters
    assert {f.name for f in schema.ARGUMENTS} <= set(parameters)
    with pytest.raises(TypeError, match="did you mean 'logp_rollout'"):
        offdrift.record(tmp_path, step=1, logp_rolout=[[-1.0]], mask=[[1]])
