"""Many small files are read a bundle at a time, and the audit is that of every file by itself."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from offdrift.audit.conclude import conclude
from offdrift.audit.entry import options_of
from offdrift.audit.partial import Job, work
from offdrift.audit.small_files import BUNDLE_BYTES, SMALL_BYTES, bundled, joined
from offdrift.audit.stream import audit as read_all
from offdrift.records.batch import ROW_BITS
from offdrift.records.readers import Piece, detect, pieces, read

FILES = 6


def rows(seed: int, count: int, *, without: str = "") -> list[dict]:
    generator = np.random.default_rng(seed)
    made = []
    for i in range(count):
        n = int(generator.integers(3, 30))
        first = -generator.exponential(1.0, n) - 0.01
        second = np.minimum(first + generator.normal(0, 0.1, n), -1e-4)
        row = {
            "step": seed // 2,
            "group_id": i // 2,  # the same numbers in every file
            "reward": float(generator.random() < 0.5),
            "advantage": float(generator.normal()),
            "logp_rollout": first.tolist(),
            "logp_old": second.tolist(),
            "logp": np.minimum(second + generator.normal(0, 0.05, n), -1e-4).tolist(),
        }
        row.pop(without, None)
        made.append(row)
    return made


def write(folder: Path, name, *, without: dict[int, str]) -> list[str]:
    files = []
    for seed in range(FILES):
        file = folder / name(seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row) for row in rows(seed, 8, without=without.get(seed, ""))]
        if seed == 1:
            lines.insert(3, "{broken")
        file.write_text("".join(f"{line}\n" for line in lines))
        files.append(str(file))
    return files


NAMES = {
    "steps": lambda i: f"step_{i}.jsonl",
    "ranks": lambda i: f"step_{i // 2}/rank_{i % 2}.jsonl",
}


def told(found, plan, folder) -> dict:
    job = Job(found)
    result = conclude(read_all(job, plan, folder=folder), job)
    return {k: v for k, v in result.items() if k not in ("created", "source")}


def same(a, b, where=""):
    """Equal up to the rounding of float32 sums in another order: 2^-24 of a sum of absolute values, a few times."""
    assert type(a) is type(b) or {type(a), type(b)} <= {int, float}, where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{where}/{i}")
    elif isinstance(a, float) or isinstance(b, float):
        assert math.isclose(a, b, rel_tol=16 * 2**-24, abs_tol=16 * 2**-24), f"{where}: {a} and {b}"
    else:
        assert a == b, where


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("without", [{}, {2: "logp_old", 4: "reward"}], ids=["alike", "fields differ"])
def test_an_audit_of_bundles_is_that_of_every_file(tmp_path, name, without):
    write(tmp_path / "log", NAMES[name], without=without)
    found = detect([str(tmp_path / "log")])
    alone = pieces(found)
    together = options_of().plan(found)
    assert (len(alone), len(together)) == (FILES, 1)
    one, other = told(found, alone, tmp_path / "a"), told(found, together, tmp_path / "b")
    assert one["counts"]["sequences"] == 8 * FILES
    assert one["counts"]["bad_rows"] == 1
    for result in (one, other):
        result.pop("shapes")  # some cuts are made only where both of their sides are in a batch
        result.pop("methods")  # some weights are normalized over a batch
    same(one, other)
    files = {entry["file"] for entry in other["worst"]["sequences"]}
    assert len(files) == FILES
    assert {entry["row"] for entry in other["worst"]["sequences"]} <= set(range(1, 10))


def test_an_audit_of_small_files_is_that_of_one_file_with_their_rows(tmp_path):
    files = [tmp_path / "many" / f"{step}.jsonl" for step in range(FILES)]
    files[0].parent.mkdir()
    for step, file in enumerate(files):
        lines = [json.dumps({**row, "step": step}) for row in rows(step, 8)]
        file.write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "one.jsonl").write_text("".join(file.read_text() for file in files))
    many, one = detect([str(tmp_path / "many")]), detect([str(tmp_path / "one.jsonl")])
    a = told(many, options_of().plan(many), tmp_path / "a")
    b = told(one, options_of().plan(one), tmp_path / "b")
    for result in (a, b):
        result.pop("coverage")  # names the number of files
        for entry in (*result["worst"]["sequences"], *result["worst"]["tokens"]):
            entry["row"] = None if entry.pop("file") else 0
    assert a["shapes"]["looked_at"] > 0
    same(a, b)


def test_groups_of_files_that_count_them_alike_stay_apart(tmp_path):
    write(tmp_path, NAMES["ranks"], without={})
    found = detect([str(tmp_path)])
    batches = [(i, batch) for i, piece in enumerate(pieces(found)) for batch in read(piece, found).batches]
    (whole,) = joined(batches, found.files)
    assert whole.num_sequences == 8 * FILES
    assert len(whole.segments.group_ids.unique()) == sum(len(b.group_ids.unique()) for _, b in batches)
    assert (whole.row >> ROW_BITS).tolist() == [i for i, b in batches for _ in range(b.num_sequences)]
    at = whole.cu_seqlens[9], whole.cu_seqlens[10]
    assert torch.equal(whole.logp[at[0] : at[1]], batches[1][1].logp[slice(*batches[1][1].cu_seqlens[1:3])])


def test_only_neighbors_that_are_small_are_read_together():
    sizes = {"a": 10, "b": 10, "large": SMALL_BYTES + 1, "c": 10, "cut": 20, "d": 10}
    plan = [Piece(name, 0, sizes[name], "plain") for name in ("a", "b", "large", "c")]
    plan += [Piece("cut", 0, 10, "plain"), Piece("cut", 10, 20, "plain"), Piece("d", 0, 10, "plain")]
    made = bundled(plan, sizes)
    assert [[p.file for p in piece.each] for piece in made] == [["a", "b"], ["large"], ["c"], ["cut"], ["cut"], ["d"]]
    many = [Piece(f"{i}", 0, SMALL_BYTES, "plain") for i in range(40)]
    groups = [piece.each for piece in bundled(many, {p.file: SMALL_BYTES for p in many})]
    assert [p.file for group in groups for p in group] == [p.file for p in many]
    assert {len(group) for group in groups} == {BUNDLE_BYTES // SMALL_BYTES}


def test_the_first_bundles_do_not_change_when_files_are_added():
    many = [Piece(f"{i}", 0, SMALL_BYTES, "plain") for i in range(20)]
    sizes = {p.file: SMALL_BYTES for p in many}
    two = 2 * BUNDLE_BYTES // SMALL_BYTES
    assert bundled(many[:two], sizes) == bundled(many, sizes)[:2]


def test_a_file_of_a_bundle_that_changes_is_read_again(tmp_path):
    files = write(tmp_path / "log", NAMES["steps"], without={})
    found = detect([str(tmp_path / "log")])
    before = told(found, options_of().plan(found), tmp_path / "parts")["overall"]["reward/mean"]
    text = Path(files[3]).read_text()
    Path(files[3]).write_text(text.replace('"reward": 0.0', '"reward": 1.0'))  # as many bytes as before
    found = detect([str(tmp_path / "log")])
    after = told(found, options_of().plan(found), tmp_path / "parts")["overall"]["reward/mean"]
    assert after - before == pytest.approx(text.count('"reward": 0.0') / (8 * FILES))
    assert after > before


def test_a_sample_of_a_bundle_is_that_of_its_files(tmp_path):
    write(tmp_path, NAMES["steps"], without={})
    found = detect([str(tmp_path)])
    job = Job(found, sample_rate=0.5)
    (bundle,) = options_of().plan(found)
    together = work(bundle, job).counterfactual
    alone = [part for piece in pieces(found) if (part := work(piece, job).counterfactual) is not None]
    assert together.table()[0]["sampled_sequences"] == sum(part.table()[0]["sampled_sequences"] for part in alone)
    assert 0 < together.table()[0]["sampled_sequences"] < 8 * FILES
