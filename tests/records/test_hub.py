"""An audit of a data set of the Hugging Face hub, by the hub's own client and a server on loopback."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfFileSystem, constants

from offdrift.audit.partial import Job
from offdrift.audit.stream import audit
from offdrift.errors import RecordError
from offdrift.records.readers import detect, fingerprint, pieces
from offdrift.records.recorder import write_log
from tests.audit.logs import drawn
from tests.records.hub import API, FILES, Hub, serving


@pytest.fixture
def log(tmp_path: Path) -> Path:
    for i in range(2):
        write_log(drawn(seed=i), tmp_path / "log" / f"batch-{i}.parquet")
    return tmp_path / "log"


@pytest.fixture
def hub(log: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with these files and a README; the client takes it for the hub, as with HF_ENDPOINT."""
    with serving() as hub:
        hub.files = {f"run/{file.name}": file.read_bytes() for file in log.iterdir()} | {"README.md": b"# log"}
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        HfFileSystem.clear_instance_cache()
        yield hub
    HfFileSystem.clear_instance_cache()


def numbers(found: Path | str, folder: Path) -> str:
    """What an audit counted, without the names of files."""
    log = detect([str(found)])
    part = audit(Job(log, sample_rate=1e-9), pieces(log), folder=folder)
    assert part.unread.rows == 0
    counted = part.tally.as_dict()
    return json.dumps({name: counted[name] for name in ("counts", "overall", "facets", "steps", "histograms")})


@pytest.mark.parametrize("inside", ["run", "run/*.parquet"])
def test_a_data_set_gives_what_the_same_files_on_disk_give(hub: Hub, log: Path, inside: str, tmp_path: Path) -> None:
    address = f"hf://datasets/me/log/{inside}"
    assert numbers(address, tmp_path / "hub") == numbers(log, tmp_path / "disk")
    assert f"{FILES}run/batch-1.parquet" in hub.asked
    assert f"{FILES}README.md" not in hub.asked


def test_lines_are_read_and_a_file_that_changed_is_another(hub: Hub, tmp_path: Path) -> None:
    row = {"rollout_logprobs": [-1.0, -2.0], "train_logprobs": [-1.1, -2.0], "loss_mask": [1, 1]}
    hub.files["lines.jsonl"] = b"".join(json.dumps(row).encode() + b"\n" for _ in range(3))
    address = "hf://datasets/me/log/lines.jsonl"
    (tmp_path / "lines.jsonl").write_bytes(hub.files["lines.jsonl"])
    assert numbers(address, tmp_path / "hub") == numbers(tmp_path / "lines.jsonl", tmp_path / "disk")
    assert fingerprint(address) == fingerprint(address)


def test_what_is_not_there_is_named(hub: Hub) -> None:
    for address in ("hf://datasets/me/log/nothing", "hf://datasets/me/none/run", "hf://datasets/me/log/*.pt"):
        with pytest.raises(RecordError, match="no log at hf://datasets/me/"):
            detect([address])
    with pytest.raises(RecordError, match=r"cannot read hf://me: .*namespace/name.*; check the address"):
        detect(["hf://me"])


def test_a_right_that_is_missing_is_named_with_the_way_out(hub: Hub) -> None:
    """Where a file of the data set is read, and where the data set is looked for: the hub shows none that is private."""
    address = "hf://datasets/me/log/run/batch-0.parquet"
    hub.status[FILES] = 403
    with pytest.raises(RecordError, match=rf"{address}: .*403.*give the client of hf:// its credentials"):
        detect([address])
    hub.status = {API: 401}
    HfFileSystem.clear_instance_cache()
    with pytest.raises(RecordError, match=f"no log at {address}: .*no right to see it"):
        detect([address])


@pytest.mark.parametrize("address", ["wandb://me/project/run:v3", "wandb-artifact://me/project/run:v3/log.parquet"])
def test_an_artifact_of_wandb_is_refused_with_the_way_out(address: str) -> None:
    with pytest.raises(RecordError, match="`wandb artifact get me/project/run:v3 --root FOLDER`, and give FOLDER"):
        detect([address])
