"""Files that are made to hang a reader, end its process, or take all of its memory.

Each is read in a process that may take little more memory than it has when everything is loaded.
"""

import gzip
import io
import json
import os
import re
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from offdrift.errors import RecordError
from offdrift.records.readers import detect, pickles, pieces, read
from offdrift.records.readers.files import opened
from offdrift.records.readers.pickles import load_pickle, load_torch
from offdrift.records.recorder import write_log
from tests.records import crafted
from tests.records.samples import LOGS, ragged, read_all

ROOT = Path(__file__).parents[2]
GOOD = '{"logp_rollout": [-1.0, -2.0], "logp": [-1.5, -2.5]}\n'
MEMORY = 768
"""MiB beyond what is loaded."""


def outcomes(*paths: Path, limit: int = 256, timeout: float = 240) -> list[dict[str, Any]]:
    """What comes of reading each path, in a process of its own."""
    command = [sys.executable, "-m", "tests.records.hostile", str(limit), str(MEMORY)]
    told = subprocess.run([*command, *map(str, paths)], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert told.returncode == 0, told.stderr[-3000:]
    return [json.loads(line) for line in told.stdout.splitlines()]


def sample(values: Any) -> dict[str, Any]:
    return {"response_lengths": len(values), "rollout_log_probs": values, "log_probs": values}


def dump(path: Path, samples: list[dict[str, Any]]) -> None:
    torch.save({"rollout_id": 1, "samples": samples}, path)


def rewrite(path: Path, change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED) -> None:
    """An archive with other records."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))


def huge_storage(path: Path) -> None:
    """A storage that claims more than its record has."""
    dump(path, [sample(torch.zeros(4))])
    rewrite(path, lambda name, x: x.replace(b"K\x04", b"J\xff\xff\xff\x7f") if name.endswith("data.pkl") else x)


def deflated(path: Path) -> None:
    dump(path, [sample(torch.zeros(4_000_000, dtype=torch.uint8))])
    rewrite(path, lambda name, data: data, zipfile.ZIP_DEFLATED)


def many_copies() -> bytes:
    """A dict that is made again and again from one that is remembered."""
    entries = b"".join(b"X\x04\x00\x00\x00" + str(i).zfill(4).encode() + b"K\x00" for i in range(9000))
    made = b"ccollections\nOrderedDict\nq\x02h\x01\x85R" + b"h\x02h\x01\x85R" * 300_000
    return b"}q\x01(" + entries + b"u" + made + b"."


ARCHIVES: dict[str, tuple[Callable[[Path], None], str]] = {
    # Gigabytes in less than 2 KB.
    "expanded tensor": (
        lambda path: dump(path, [sample(torch.zeros(1).expand(1_000_000_000))]),
        r"1000000000 elements, its storage 1; it was refused",
    ),
    "huge storage": (huge_storage, r"claims 2147483647 elements .*has 16 bytes"),
    "deflated": (deflated, r"the archive is compressed"),
}
PICKLES: dict[str, tuple[bytes, str]] = {
    "memo": (b"K\x00r\xff\xff\xff\x7f.", "no training batch"),
    "bytes": (b"\x8e" + struct.pack("<Q", 1 << 40) + b".", "damaged"),
    "bytearray": (b"\x96" + struct.pack("<Q", 1 << 40) + b".", "damaged"),
    "frame": (b"\x95" + struct.pack("<Q", 1 << 40) + b".", "damaged|no training"),
    "long": (b"\x8b" + struct.pack("<i", 2**31 - 1) + b".", "damaged"),
    # A dict whose key is a tuple in a tuple in a tuple ...: its hash overflows the stack.
    "nested key": (b"})" + b"\x85" * 2_000_000 + b"K\x00s.", "takes more than 256 MiB|has a tuple as a key"),
    "dicts": (b"(" + b"}" * 20_000_000 + b"l.", "takes more than 256 MiB"),
    "copies": (many_copies(), "damaged|refused"),
}


def test_files_that_ask_for_gigabytes_are_refused(tmp_path: Path) -> None:
    expected = {}
    for name, (make, pattern) in ARCHIVES.items():
        make(tmp_path / f"{name}.pt")
        expected[tmp_path / f"{name}.pt"] = pattern
    for name, (program, pattern) in PICKLES.items():
        (tmp_path / f"{name}.pkl").write_bytes(b"\x80\x05" + program)
        expected[tmp_path / f"{name}.pkl"] = pattern
    for path, outcome in zip(expected, outcomes(*expected), strict=True):
        assert "error" in outcome, (path, outcome)
        assert str(path) in outcome["error"]
        assert re.search(expected[path], outcome["error"]), outcome


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text


def test_what_takes_too_much_is_left_out_and_the_rest_is_read(tmp_path: Path) -> None:
    tensor, values = torch.zeros(1_000_000), [0.0] * 100_000
    listed = {"response_length": 100_000, "rollout_log_probs": values, "tokens": values}
    made = {
        "1": [sample(tensor)] * 1000,
        "2": [dict(listed) for _ in range(3000)],
        "3": [sample(tensor[i:]) for i in range(1000)],  # many tensors on one storage
    }
    for name, samples in made.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.pt").write_bytes((LOGS / "slime" / "train_data" / "7.pt").read_bytes())
        dump(tmp_path / name / f"{name}.pt", samples)
    for name, outcome in zip(made, outcomes(*(tmp_path / name for name in made)), strict=True):
        assert outcome["sequences"] == 3, outcome
        ((file, row, reason),) = outcome["bad"]
        assert (Path(file).name, row) == (f"{name}.pt", 0)
        assert "more than 256 MiB, the most that it may; allow more with --max-file-mib" in reason


LIES = {
    "the footer says too little": ([100_000_000], 5, 1),
    "the last page is larger than the footer says": ([3, 100_000_000], 4, 1),
    "more than memory in one row": ([100_000_000], None, 1),
    "in one column of many pages": ([1_000_000] * 100, None, 1),
}
"""Values of the pages, values by the footer, and row groups."""


def test_the_pages_of_a_parquet_file_decide_and_not_its_footer(tmp_path: Path) -> None:
    """Gigabytes from hundreds of bytes: nothing is decoded that the headers of the pages say is too much."""
    paths = []
    for i, (pages_, claimed, groups) in enumerate(LIES.values()):
        paths.append(tmp_path / f"{i}.parquet")
        crafted.write(paths[-1], pages_, claimed=claimed, groups=groups)
    assert paths[0].stat().st_size < 1133
    crafted.write(tmp_path / "fits.parquet", [1_900_000], claimed=None)
    *told, fits = outcomes(*paths, tmp_path / "fits.parquet", limit=64)
    for name, outcome in zip(LIES, told, strict=True):
        assert outcome["sequences"] == 0, name
        assert outcome["grown"] < 16, (name, outcome)
        assert_matches(
            r"values in its pages|has a page of|decodes to [\d,]+ MiB, more than 64 MiB", str(outcome["bad"])
        )
    assert fits["sequences"] == 1
    assert fits["grown"] <= 64, fits


def test_row_groups_that_share_their_pages_are_limited_together(tmp_path: Path) -> None:
    """Ten thousand bytes of footer name the same page again and again: the file decodes to so much, and no more."""
    crafted.write(tmp_path / "a.parquet", [1_000_000], groups=100)
    (outcome,) = outcomes(tmp_path / "a.parquet", limit=64)
    assert 1 <= outcome["sequences"] <= 8
    assert len(outcome["bad"]) == 100 - outcome["sequences"]
    assert "with the row groups before, the file decodes to" in outcome["bad"][-1][2]
    assert outcome["grown"] <= 128  # the batches of four row groups, which are kept here, and what one takes meanwhile


def test_a_text_that_is_repeated_inside_lists_is_counted_as_often(tmp_path: Path) -> None:
    pq.write_table(pa.table({"completion": [["x" * 1_000_000] * 270], "reward": [1.0]}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 200_000
    (outcome,) = outcomes(tmp_path / "a.parquet")
    assert outcome["sequences"] == 0
    assert_matches(r"texts decode to [\d,]+ MiB, more than 256 MiB", str(outcome["bad"]))


def test_thousands_of_row_groups_cost_little_more_than_one(tmp_path: Path) -> None:
    n = 3000
    table = pa.table({"logp_rollout": [[-1.0, -2.0]] * n, "logp": [[-1.1, -2.1]] * n, "step": [1] * n})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    read_all(LOGS / "slime")  # everything is loaded
    began = time.process_time()
    _, batches, bad = read_all(tmp_path / "a.parquet")
    assert time.process_time() - began < 8
    assert sum(b.num_sequences for b in batches) == n
    assert not bad


@pytest.mark.slow
def test_compressed_files_are_read_in_pieces_and_up_to_a_limit(tmp_path: Path) -> None:
    rows, line = tmp_path / "rows.jsonl.gz", tmp_path / "line.jsonl.gz"
    row = json.dumps({"logp_rollout": [-1.0] * 500, "logp": [-1.5] * 500}) + "\n"
    rows.write_bytes(gzip.compress(row.encode() * 1000) * 100)  # 600 MB in 2 MB
    line.write_bytes(gzip.compress(GOOD.encode()) + gzip.compress(b"[" * (16 << 20)) * 15)
    first, second = outcomes(rows, line, limit=64)
    read_rows = 64 * 2**20 // len(row)
    assert first["sequences"] == read_rows
    assert first["pieces"] > 3
    ((_, at, reason),) = first["bad"]
    assert at == read_rows + 1
    assert "the file decompresses to more than 64 MiB" in reason
    assert second["sequences"] == 1
    assert_matches("the line has more than 1 MiB", str(second["bad"]))


def test_a_line_that_is_too_long_costs_itself(tmp_path: Path) -> None:
    # 40 MiB that decode to 25 times as much.
    long = b'{"x": [' + b"{}," * (14 << 20) + b"{}]}\n"
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + long + GOOD.encode())
    (outcome,) = outcomes(tmp_path / "a.jsonl")
    assert outcome["sequences"] == 2
    ((_, row, reason),) = outcome["bad"]
    assert row == 2
    assert "the line has more than 4 MiB" in reason


@pytest.mark.slow
def test_parquet_that_decodes_to_gigabytes_is_left_out(tmp_path: Path) -> None:
    """A run of equal log-probs takes no space, and a text that is in every row is stored once."""
    n = 34_000_000
    lists = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), pa.array(np.zeros(n, np.float32)))
    tables = [
        pa.table({"logp_rollout": lists, "logp": lists}),
        pa.table({"completion": ["x" * 1_000_000] * 270, "reward": [1.0] * 270}),
    ]
    paths = [tmp_path / f"{i}.parquet" for i in range(2)]
    for path, table in zip(paths, tables, strict=True):
        pq.write_table(table, path, compression="zstd")
        assert path.stat().st_size < 2000
    for outcome in outcomes(*paths):
        assert outcome["sequences"] == 0
        assert_matches(r"decodes? to [\d,]+ MiB, more than 256 MiB", str(outcome["bad"]))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with a log, and with what has the name of one."""
    (tmp_path / "0.jsonl").write_text(GOOD)
    os.mkfifo(tmp_path / "1.jsonl")
    (tmp_path / "2.jsonl").symlink_to("gone.jsonl")
    (tmp_path / "3.jsonl").symlink_to("3.jsonl")
    (tmp_path / "4.jsonl").symlink_to("/dev/zero")
    (tmp_path / "5.jsonl").mkdir()
    (tmp_path / "9.jsonl").write_text(GOOD)
    return tmp_path


def test_what_is_no_file_is_skipped_and_named(mixed: Path) -> None:
    (told,) = outcomes(mixed, timeout=60)
    assert (told["sequences"], told["bad"]) == (2, [])
    reasons = {Path(file).name: reason for file, _, reason in told["skipped"]}
    assert reasons.keys() == {"1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl"}
    assert reasons["1.jsonl"] == "it is a pipe, no file"
    assert_matches("a link that leads nowhere: No such file", reasons["2.jsonl"])
    assert_matches("a link that leads nowhere: Too many levels", reasons["3.jsonl"])
    assert reasons["4.jsonl"] == "it is a device, no file"
    said = detect([str(mixed)]).description
    assert "4 files cannot be read" in said
    assert f"{mixed / '1.jsonl'} (it is a pipe, no file)" in said
    assert len(detect([str(mixed / "*.jsonl")]).skipped) == 4


def test_a_folder_of_nothing_that_can_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1.jsonl")
    with pytest.raises(RecordError, match=r"no log that can be read: .*1.jsonl: it is a pipe"):
        detect([str(tmp_path)])


@pytest.mark.parametrize("name", ["1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl"])
def test_what_is_named_itself_and_is_no_file_is_an_error(mixed: Path, name: str) -> None:
    with pytest.raises(RecordError, match=rf"cannot read .*{name}: it is "):
        detect([str(mixed / name)])


def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD)
    found = detect([str(path)])
    (piece,) = pieces(found)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordError, match="it is a pipe"), opened(str(path)):
        pass
    with pytest.raises(RecordError, match="it is a pipe"):
        read(piece, found)


@pytest.mark.slow
def test_links_that_lead_back_do_not_multiply_a_glob(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "a.jsonl").write_text(GOOD)
    for name in "xyz":
        (tmp_path / "step_1" / name).symlink_to("..")
    for pattern in ("**/*.jsonl", "**/step_*/**/*.jsonl", "*/*.jsonl"):
        (found,) = outcomes(tmp_path / pattern, timeout=60)
        assert (found["sequences"], found["pieces"]) == (1, 1), pattern


@pytest.mark.parametrize("depth", [400, 900, 1000, 100_000])
def test_lists_in_lists_in_lists(tmp_path: Path, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    prime = (LOGS / "prime_rl/token_exports/step_7/rank_0.jsonl").read_text().splitlines()[0]
    row = json.loads(prime)
    plain = GOOD.rstrip()[:-1] + f', "prompt": {nested}}}\n'
    own = json.dumps({**row, "token_ids": "X"}).replace('"X"', nested) + "\n"
    for i, text in enumerate((GOOD + plain, prime + "\n" + own)):
        path = tmp_path / f"{i}.jsonl"
        path.write_text(text)
        _, batches, bad = read_all(path)
        kept = sum(b.num_sequences for b in batches)
        assert kept + len(bad) == 2
        assert kept >= 1


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read")
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet", "pt", "pkl"])
def test_a_disk_that_fails_costs_one_file(tmp_path: Path, suffix: str) -> None:
    good = {
        "jsonl": GOOD.encode(),
        "jsonl.gz": gzip.compress(GOOD.encode()),
        "parquet": write_log(ragged(3), tmp_path / "log.bin").read_bytes(),
        "pt": (LOGS / "slime" / "train_data" / "7.pt").read_bytes(),
        "pkl": (LOGS / "skyrl/dumped_data/global_step_7_training_input.pkl").read_bytes(),
    }
    (tmp_path / f"1.{suffix}").write_bytes(good[suffix])
    # Its first page cannot be read: the operating system says EIO.
    (tmp_path / f"2.{suffix}").symlink_to("/proc/self/mem")
    _, batches, bad = read_all(tmp_path)
    assert len(batches) == 1
    assert [Path(b.file).name for b in bad] == [f"2.{suffix}"]
    with pytest.raises(RecordError, match=rf"2.{suffix}"):
        detect([str(tmp_path / f"2.{suffix}")])


def test_a_page_that_was_damaged_is_not_read_as_data(tmp_path: Path) -> None:
    path = write_log(ragged(40), tmp_path / "a.parquet")
    table = pq.read_table(path)
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    place = pq.read_metadata(path).row_group(0)
    columns = map(place.column, range(place.num_columns))
    column = next(c for c in columns if c.path_in_schema.startswith("logp."))
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 8] ^= 0x10
    path.write_bytes(bytes(data))
    _, batches, bad = read_all(path)
    assert batches == []
    assert_matches("rows 1 to 40 cannot be decoded: .*(CRC|checksum)", bad[0].reason)


def test_our_own_logs_have_page_checksums(tmp_path: Path) -> None:
    path = write_log(ragged(4000), tmp_path / "a.parquet")
    clean = path.read_bytes()
    place = pq.read_metadata(path).row_group(0)
    found = 0
    for column in map(place.column, range(place.num_columns)):
        data = bytearray(clean)
        begin = column.dictionary_page_offset or column.data_page_offset
        data[begin + column.total_compressed_size - 3] ^= 0x01
        path.write_bytes(bytes(data))
        _, _, bad = read_all(path)
        found += len(bad) > 0
    assert found == place.num_columns


class TestTorch:
    """What `torch.save` writes is what is read, and nothing else."""

    @pytest.mark.parametrize("dtype", pickles.DTYPES.values(), ids=str)
    def test_tensors(self, dtype: torch.dtype) -> None:
        whole = (torch.arange(24).reshape(4, 6) % 2 * 3).to(dtype)
        held = {
            "whole": whole, "view": whole[1:3, ::2], "turned": whole.T, "same": whole,
            "scalar": whole[0, 1], "empty": whole[:0], "none": None,
        }  # fmt: skip
        file = io.BytesIO()
        torch.save(held, file)
        found = load_torch(file)
        for name, x in held.items():
            if x is None:
                assert found[name] is None
            else:
                mine = found[name].read()
                assert mine.dtype == x.dtype
                assert torch.equal(mine, x)
        file.seek(0)
        assert found.keys() == torch.load(file, weights_only=True).keys()

    def test_numbers_texts_and_arrays(self) -> None:
        held = {
            "ints": [0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**40, -(2**70)],
            "floats": [0.0, -0.0, 1e-300, float("inf")], "mixed": [1, None, True, 2.5, "x", False, b"y"],
            "texts": ["", "é", "x" * 300, "\U0001f600" * 70_000], "tuple": (1, (2, 3), (4,), (1, 2, 3, 4)),
            "set": {7}, "array": np.arange(6, dtype=np.float32).reshape(2, 3),
            "turned": np.asfortranarray(np.arange(6).reshape(2, 3)), "number": np.float64(0.5),
            "big": np.arange(3, dtype=">i4"), "shape": torch.Size([2, 3]), 5: "five",
        }  # fmt: skip
        held["again"] = held["ints"]
        file = io.BytesIO()
        torch.save(held, file)
        found = load_torch(file)
        for name in ("ints", "floats", "mixed", "texts", "tuple", "number", "again", 5):
            assert found[name] == held[name], name
        assert found["set"] == [7]
        assert found["shape"] == (2, 3)
        assert found["again"] is found["ints"]
        for name in ("array", "turned", "big"):
            assert np.array_equal(found[name].value, held[name])

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_pickles(self, protocol: int) -> None:
        import pickle

        held = {"a": [1, 2.5, None, {"b": ("x", b"y" * 300)}], "c": list(range(2000))}
        if protocol == 5:
            held["d"] = bytearray(b"z")
        assert load_pickle(io.BytesIO(pickle.dumps(held, protocol))) == held

    def test_every_byte_of_the_instructions_may_be_wrong(self) -> None:
        """Only our error or one of Python's; never another value type, never a call."""
        data = (LOGS / "slime" / "train_data" / "7.pt").read_bytes()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        (name,) = (n for n in records if n.endswith("data.pkl"))
        generator = np.random.default_rng(0)
        ended = {"fine": 0, "ours": 0, "damaged": 0}
        for _ in range(250):
            program = bytearray(records[name])
            for place in generator.integers(0, len(program), 2):
                program[place] = generator.integers(256)
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w") as archive:
                for n, d in {**records, name: bytes(program)}.items():
                    archive.writestr(n, d)
            try:
                load_torch(file, 1 << 24)
                ended["fine"] += 1
            except RecordError:
                ended["ours"] += 1
            except Exception:
                ended["damaged"] += 1
        assert min(ended.values()) > 5, ended


FORMATS = {
    "jsonl": "nemo_rl/train_data_step7.jsonl", "prime.jsonl": "prime_rl/token_exports/step_7/rank_0.jsonl",
    "oi.jsonl": "open_instruct/run_rollouts_000000.jsonl", "pt": "slime/train_data/7.pt",
    "miles.pt": "miles/train_data/7_0.pt", "pkl": "skyrl/dumped_data/global_step_7_training_input.pkl",
    "parquet": "miles/dashboard_columns/rollout_7.parquet", "jsonl.gz": "", "jsonl.zst": "", "own.parquet": "",
}  # fmt: skip


@pytest.mark.parametrize("suffix", FORMATS)
def test_damaged_files_of_every_format_are_read_or_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train_data_step7.{suffix}"
    if suffix.endswith((".gz", ".zst")):
        kind = {"gz": "gzip", "zst": "zstd"}[suffix.rsplit(".")[-1]]
        with pa.output_stream(str(path), compression=kind) as stream:
            stream.write((LOGS / FORMATS["jsonl"]).read_bytes() * 20)
        data = path.read_bytes()
    elif suffix == "own.parquet":
        data = write_log(ragged(30), path).read_bytes()
    else:
        data = (LOGS / FORMATS[suffix]).read_bytes()
    path.write_bytes(data)
    found = detect([str(path)], limit=1 << 26)
    generator = np.random.default_rng(0)
    for i in range(80):
        damaged = bytearray(data)
        for place in generator.integers(0, len(data), 1 + i % 4):
            damaged[place] = generator.integers(256)
        path.write_bytes(bytes(damaged[: len(data) if i % 2 else generator.integers(0, len(data))]))
        reads = [read(piece, found) for piece in pieces(found)]
        assert reads
        for file, row, reason in (b[:3] for r in reads for b in r.bad):
            assert file == str(path)
            assert row >= 0
            assert 0 < len(reason) < 2000
        try:
            detect([str(path)], limit=1 << 26)
        except RecordError as e:
            said = str(e)
            assert len(said) < 3000
