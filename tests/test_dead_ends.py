"""Places where a command led nowhere: each message names what is wrong and the way out."""

import json
import re
from pathlib import Path

import pytest

from offdrift.cli import missing
from offdrift.cli.exit_codes import ExitCode
from offdrift.engines.isolation import start_local_ray
from offdrift.errors import EngineError, RecordError
from offdrift.models import load_model, save_for_engine
from offdrift.records.readers import files
from offdrift.records.recorder import write_log
from tests.audit.logs import drawn
from tests.command import command


def test_the_next_step_of_watch_is_a_command_that_audit_accepts(tmp_path, monkeypatch, capsys):
    for arm in ("none", "ppo_clip"):
        write_log(drawn(sequences=40, steps=2), tmp_path / "run" / "arms" / arm / "log" / "batch-0.parquet")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"arms": {}}))
    monkeypatch.chdir(tmp_path)
    done = command(monkeypatch, capsys, "watch", "run", "--until-idle", "0.1", "--every", "0.05")
    words = re.search(r"next: offdrift (audit \S+)", done.stderr)
    assert words is not None, done.stderr
    assert command(monkeypatch, capsys, *words[1].split()).code == ExitCode.FINE


def test_a_chart_that_cannot_be_drawn_is_refused_before_the_table(monkeypatch, capsys):
    done = command(monkeypatch, capsys, "bound", "--T", "64", "--delta", "1e-4", "--chart", "x.pdf")
    assert (done.code, done.stdout) == (ExitCode.ERROR, "")
    assert "x.pdf" in done.stderr


def test_what_judges_a_policy_needs_the_extra_that_loads_one():
    assert missing("transformers", "certify").endswith("pip install 'offdrift[train]'")


class NoCredentialsError(Exception):
    """As of botocore: no `OSError`, no `ValueError`."""


class Store:
    """A store whose client raises an error of its own at every call."""

    def __getattr__(self, name):
        def call(*_, **__):
            raise NoCredentialsError("Unable to locate credentials\n  a hundred lines follow")

        return call


@pytest.mark.parametrize("read", [lambda p: files.find([p]), files.size, files.fingerprint, lambda p: files.opened(p).__enter__()])  # fmt: skip
def test_a_store_without_credentials_is_one_line(monkeypatch, read):
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda path: (Store(), path))
    with pytest.raises(RecordError, match=r"cannot read s3://b/log.jsonl: NoCredentialsError: Unable to locate credentials; give .* credentials") as e:  # fmt: skip
        read("s3://b/log.jsonl")
    assert "hundred" not in str(e.value)


def test_a_url_that_no_client_is_for_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    done = command(monkeypatch, capsys, "audit", "nostore://bucket/log.jsonl")
    assert done.code == ExitCode.ERROR
    assert "nostore://bucket/log.jsonl" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


def test_ray_that_does_not_start_in_time_is_an_error_of_ours(monkeypatch):
    import ray

    def late(**_):
        raise Exception(
            "The current node timed out during startup. This could happen because some of the raylet failed"
        )

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(EngineError, match=r"timed out during startup.*--jobs"):
        start_local_ray()
    starts = iter([late, lambda **_: None])
    monkeypatch.setattr(ray, "init", lambda **options: next(starts)(**options))
    start_local_ray()
    assert next(starts, None) is None, "the second try"


@pytest.mark.parametrize("place", ["file", "file/below", "folder"])
def test_a_model_that_cannot_be_written_names_the_folder(tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "model.safetensors").mkdir(parents=True)  # a folder where the weights go
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    with pytest.raises(RecordError, match=re.escape(str(Path(tmp_path, place)))):
        save_for_engine(model, tokenizer, tmp_path / place)


@pytest.mark.parametrize("words", [("audit", "log.jsonl"), ("watch", ".", "--until-idle", "0.1")])
def test_a_framework_that_is_none_is_refused_with_the_nearest(monkeypatch, capsys, tmp_path, words):
    (tmp_path / "log.jsonl").write_text('{"logp_rollout": [-1.0], "logp": [-1.0]}')
    monkeypatch.chdir(tmp_path)
    done = command(monkeypatch, capsys, *words, "--framework", "trll")
    assert done.code == ExitCode.ERROR
    for words in ("framework='trll' is not one of", "did you mean 'trl'?"):
        assert words in done.stderr


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("empty", "the folder is empty"),
        ("texts", "the folder holds no file ending in .parquet, "),
        ("gone", "it does not exist"),
        ("g*ne", "no file has a name like this"),
    ],
)
def test_where_no_log_is_the_reason_is_one(tmp_path, named, why):
    for folder in ("empty", "texts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "texts" / "a.txt").write_text("")
    with pytest.raises(RecordError) as error:
        files.find([str(tmp_path / named)])
    assert f"{named}: {why}" in str(error.value)
    assert ", or " not in str(error.value)


@pytest.mark.parametrize(
    ("name", "hint"), [("stale_engin", "did you mean stale_engine"), ("xyz", "offdrift docs rules")]
)
def test_a_rule_that_is_none_is_told_from_a_file(monkeypatch, capsys, name, hint):
    done = command(monkeypatch, capsys, "rules", name)
    assert done.code == ExitCode.ERROR
    for words in (f"no rule and no file is called '{name}'", hint):
        assert words in done.stderr
