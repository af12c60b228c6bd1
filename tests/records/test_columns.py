"""A column that is asked for and not there is named, with those that are; so is a field that does not exist."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offdrift.errors import RecordError
from offdrift.records.readers import detect

ROW = {"vllm_lp": [-1.0, -2.0], "mu": [-1.0, -2.0], "trainer": {"lp": [-1.1, -2.1]}, "score": 1.0}


def lines(path):
    path.write_text(json.dumps(ROW) + "\n")
    return path


def parquet(path):
    pq.write_table(pa.Table.from_pylist([ROW]), path)
    return path


LOGS = {"a.jsonl": lines, "a.parquet": parquet}


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize(("columns", "absent"), [
    ({"logp_rollout": "vllm_lpx"}, "logp_rollout=vllm_lpx"),
    ({"logp_rollout": "vllm_lp", "logp": "trainer.lpx"}, "logp=trainer.lpx"),
    ({"logp_rollout": "no", "logp": "none"}, "logp_rollout=no, logp=none"),
])  # fmt: skip
def test_a_log_of_no_known_names(tmp_path, name, columns, absent):
    file = LOGS[name](tmp_path / name)
    with pytest.raises(RecordError) as refused:
        detect([str(file)], columns=columns)
    missing = " and no ".join(pair.partition("=")[2] for pair in absent.split(", "))
    assert (
        str(refused.value) == f"columns: {absent}, but {file} has no {missing}; it has vllm_lp, mu, score, trainer.lp"
    )


def test_a_log_of_known_names_and_many_columns(tmp_path):
    row = {"logp_rollout": [-1.0], "logp": [-1.1], **{f"metric_{i}": float(i) for i in range(100)}}
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(RecordError, match=r"reward=score, but .* has no score; it has logp_rollout, .* and 42 more$"):
        detect([str(file)], columns={"reward": "score"})
