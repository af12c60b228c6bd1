"""An audit of an object store: a local S3 server on loopback, through fsspec and s3fs."""

import json
import subprocess
import sys

import pytest
import s3fs

from offdrift.audit.forecast import forecast
from offdrift.audit.partial import Job
from offdrift.audit.stream import audit, in_process, in_processes
from offdrift.errors import RecordError
from offdrift.records.readers import detect, fingerprint, pieces
from offdrift.records.recorder import write_log
from tests.audit.logs import drawn

pytestmark = pytest.mark.filterwarnings("ignore")  # of botocore

# In a process of its own: vLLM on a CPU asks every object of every imported module whether it has attributes, and those
# of Flask, on which the server is built, raise where nobody is served.
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server._server.server_port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def port():
    """Where the server listens; it ends when nothing can be said to it any more."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.communicate()


@pytest.fixture
def bucket(port, tmp_path, monkeypatch):
    """A folder of a bucket with three files, and the same files on disk."""
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local",
        "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    fs.mkdir("runs")
    for i in range(3):
        file = write_log(drawn(seed=i), tmp_path / "log" / f"batch-{i}.parquet")
        fs.put(str(file), f"runs/a/batch-{i}.parquet")
    yield fs, tmp_path / "log"
    fs.rm("runs", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def planned(log: str) -> tuple[Job, list]:
    found = detect([log])
    return Job(found, sample_rate=1e-9), pieces(found, piece_bytes=6000)


def numbers(part) -> dict:
    """What an audit counted, without the names of files."""
    counted = part.tally.as_dict()
    return {name: counted[name] for name in ("counts", "overall", "facets", "steps", "histograms")}


@pytest.mark.parametrize("path", ["s3://runs/a", "s3://runs/a/*.parquet"])
def test_a_bucket_gives_what_the_same_files_on_disk_give(bucket, tmp_path, path):
    on_disk = audit(*planned(str(bucket[1])), folder=tmp_path / "disk")
    stored = audit(*planned(path), folder=tmp_path / "store")
    assert json.dumps(numbers(stored)) == json.dumps(numbers(on_disk))
    assert stored.unread.rows == 0


def test_processes_read_a_bucket_too(bucket, tmp_path):
    one = audit(*planned("s3://runs/a"), folder=tmp_path / "one", run=in_process)
    assert audit(*planned("s3://runs/a"), folder=tmp_path / "two", run=in_processes(2)).to_bytes() == one.to_bytes()


def test_an_object_that_is_gone_is_named_and_one_that_changed_is_read_again(bucket, tmp_path):
    fs, _ = bucket
    job, plan = planned("s3://runs/a")
    before = fingerprint("s3://runs/a/batch-0.parquet")
    audit(job, plan, folder=tmp_path / "out")
    fs.put(str(write_log(drawn(seed=9), tmp_path / "new.parquet")), "runs/a/batch-0.parquet")
    fs.invalidate_cache()
    assert fingerprint("s3://runs/a/batch-0.parquet") != before
    fs.rm("runs/a/batch-1.parquet")
    fs.invalidate_cache()
    with pytest.raises(RecordError, match="batch-1"):
        audit(job, plan, folder=tmp_path / "again")
    with pytest.raises(RecordError, match="no log at s3://runs/none"):
        detect(["s3://runs/none"])


def test_a_forecast_of_a_bucket(bucket):
    job, plan = planned("s3://runs/a")
    expected = forecast(job, plan, workers=4)
    assert expected.files == 3
    assert expected.pieces == len(plan)
    assert expected.workers == 4
