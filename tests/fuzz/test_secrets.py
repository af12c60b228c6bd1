"""No key, token or password of the environment or of an address is written, printed or recorded by any command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests_lab.train.sweeps import BASE

from offdrift.engines.server.engine import OpenAIEngine
from offdrift.errors import EngineError, OffdriftError, RecordError
from offdrift.records import store
from offdrift.records.provenance import Sampling
from offdrift.records.readers import detect
from tests.engines.test_openai_broken import VOCAB, Played, playing
from tests.fuzz.readers import command

ROOT = Path(__file__).parents[2]
SECRETS = {
    "OFFDRIFT_API_KEY": "sk-PLANTED-offdrift-0001",
    "OPENAI_API_KEY": "sk-PLANTED-openai-0002",
    "HF_TOKEN": "hf_PLANTED0003",
    "WANDB_API_KEY": "PLANTEDwandb0004",
    "AWS_SECRET_ACCESS_KEY": "PLANTED/aws+0005",
    "SOME_PASSWORD": "PLANTED-hunter2-0006",
}
MARK = b"PLANTED"


def written(folder: Path) -> list[str]:
    """Files in which a secret stands, in their names or bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files if MARK in path.read_bytes() or MARK.decode() in str(path.relative_to(folder))]


@pytest.mark.slow
def test_no_command_writes_or_prints_what_the_environment_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = BASE.replace("tokens = false", "tokens = true")
    own = own.replace('task = "arithmetic"', f'reward = "{ROOT}/recipes/digits.py:digits"')
    (tmp_path / "base.toml").write_text(own)
    (tmp_path / "s.toml").write_text('name = "s"\nrecipe = "base"\nseeds = 1\narms = ["none"]\n[set]\nbatches = 2\n')
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.chdir(tmp_path)
    for words in (
        "train base.toml --out run --arms none",
        "audit run/arms/none --out audit",
        "report run",
        "watch run --until-idle 0",
        "sweep s.toml --out sweep",
        "check --model tiny-qwen3 --max-prompts 2 --max-tokens 4 --factors none --out check",
    ):
        assert MARK.decode() not in command(words, tmp_path), words
    with pytest.raises(OffdriftError) as caught:
        command("train base.toml --out run2 --set rollout.dtype=nonsense", tmp_path)
    assert MARK.decode() not in str(caught.value)
    assert (tmp_path / "check/check.json").exists()
    assert (tmp_path / "sweep/sweep.json").exists()
    assert written(tmp_path) == []


def test_a_search_for_secrets_notices_one(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x00" + SECRETS["HF_TOKEN"].encode())
    assert written(tmp_path) == [str(tmp_path / "a.bin")]


def test_a_server_that_repeats_the_key_gets_it_into_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = SECRETS["OFFDRIFT_API_KEY"]
    monkeypatch.setenv("OFFDRIFT_API_KEY", key)
    played = Played()
    cards = {"data": [{"id": f"m-{key}", "root": f"/{key}", "owned_by": "vllm", "max_model_len": 64}]}

    def fault(verb: str, path: str, body: object) -> object:
        return {"/v1/models": cards, "/version": {"version": key}}.get(path)

    played.fault = fault
    with playing(played):
        engine = OpenAIEngine(played.url, vocab_size=VOCAB, timeout=5.0, retries=0)
        played.fault = lambda verb, path, body: None
        engine.served = type(engine.served)(**{**vars(engine.served), "aliases": ("m",)})
        store.write(engine.generate([[1, 2]], Sampling(2), seed=0), tmp_path / "batch.parquet")
        assert {headers.get("Authorization") for *_, headers in played.asked} == {f"Bearer {key}"}
    assert written(tmp_path) == []
    assert "***" in json.dumps(vars(engine.served), default=str)


ADDRESSES = (
    "https://me:PLANTED@127.0.0.1:1/log.jsonl", "s3://AKIA:PLANTED@bucket/run/*.jsonl", "ftp://u:PLANTED@h/a.parquet",
    "https://bucket.example/a.jsonl?X-Amz-Signature=PLANTED&X-Amz-Credential=x", "https://h/a.jsonl?sig=PLANTED",
    "https://h/a.jsonl?a=1&access_token=PLANTED", "gs://h/a.jsonl?key=PLANTED",
)  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_log_at_an_address_with_a_secret_is_refused_without_it(address: str) -> None:
    with pytest.raises(RecordError, match="which an audit would store with the address") as caught:
        detect([address])
    assert MARK.decode() not in str(caught.value)


def test_an_address_without_a_secret_is_asked() -> None:
    with pytest.raises(OffdriftError, match=r"no log at|cannot read|needs fsspec"):
        detect(["file:///nowhere/at@all/a.jsonl?version=3"])


@pytest.mark.parametrize("url", ["http://me:PLANTED@127.0.0.1/v1", "https://h/v1?api_key=PLANTED", "http://PLANTED@h"])
def test_an_engine_at_an_address_with_a_secret_is_refused_without_it(url: str) -> None:
    with pytest.raises(EngineError) as caught:
        OpenAIEngine(url, vocab_size=VOCAB)
    assert MARK.decode() not in str(caught.value)
