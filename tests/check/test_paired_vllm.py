"""Paired differences and `--claim equal` against a real vLLM server that decodes given tokens by the plugin."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from offdrift.engines.server.engine import OpenAIEngine
from offdrift.engines.server.settings import SETTINGS
from offdrift.engines.vllm.forced import PLUGIN
from offdrift.models import save_for_engine, tiny_tokenizer
from offdrift.records.provenance import Sampling
from tests.command import command
from tests.engines.models import CACHE_MIB, VOCAB, tiny
from tests.engines.serving import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16", "--max-logprobs", "-1",
    "--generation-config", "vllm", "--kv-cache-memory-bytes", str(CACHE_MIB * 2**20),
    "--enable-prompt-tokens-details", "--logits-processors", PLUGIN,
)  # fmt: skip
PROMPTS = [[4 + i, 13, 5 + i % 7][: 1 + i % 3] for i in range(8)]
PAIRED = ("prefill", "repeats", "batch", "prefix_cache", "another engine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("served"))
    save_for_engine(tiny("dense"), tiny_tokenizer(), path)
    return path


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    with serving(folder, tmp_path_factory.mktemp("log"), *FLAGS) as address:
        yield address


def test_tokens_that_are_decoded_again_have_the_log_probs_of_the_draw_and_others_are_followed_too(url):
    engine = OpenAIEngine(url, vocab_size=VOCAB, concurrency=1)
    drawn = engine.generate(PROMPTS, Sampling(max_tokens=12), seed=0, evidence="full")
    again = engine.decoded(drawn, evidence="full")
    assert engine.decoding(PROMPTS[0]) == "logits processor"
    assert torch.equal(again.evidence.logp, drawn.evidence.logp)
    assert torch.equal(again.logp_rollout, drawn.logp_rollout)
    unlikely = drawn.with_(tokens=drawn.evidence.logp.argmin(-1).to(drawn.tokens.dtype), evidence=None)
    decoded, read = engine.decoded(unlikely), engine.forced(unlikely)
    assert float(decoded.logp_rollout.mean()) < -4
    assert torch.allclose(decoded.logp_rollout, read.logp_rollout, atol=1e-4)
    engine.close()


def test_the_server_is_proved_equal_to_vllm_in_this_process_and_not_with_one_bit_flipped(
    url, folder, tmp_path, monkeypatch, capsys
):
    flipped = tmp_path / "flipped"
    shutil.copytree(folder, flipped)
    weights = load_file(flipped / "model.safetensors")
    # In the middle of the mantissa: a change by 6e-5 of one weight.
    weights["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 5] ^= 1 << 10
    save_file(weights, flipped / "model.safetensors", metadata={"format": "pt"})
    claims = {}
    for name, model in (("same", folder), ("flipped", str(flipped))):
        words = ("check", "--model", model, "--rollout", f"vllm-server:{url},concurrency=1", "--claim", "equal")
        words += ("--against", "vllm:float32,max_model_len=256,max_num_seqs=1,kv_cache_mib=64", "--factors", "none")
        words += ("--max-prompts", "3", "--max-tokens", "8", "--out", str(tmp_path / name))
        done = command(monkeypatch, capsys, *words)
        assert done.code == (0 if name == "same" else 3), done.stdout + done.stderr
        found = json.loads((tmp_path / name / "check.json").read_text())
        claims[name] = found["claim"]
        rows = {row["factor"]: row for row in found["paired"]}
        assert tuple(rows) == (*PAIRED, *(setting.name for setting in SETTINGS))
        assert not any(rows[name]["why"] for name in PAIRED)
        assert rows["repeats"]["equal_tokens"] == found["tokens"]
        assert "cache (" in rows["prefix_cache"]["changed"]
    assert claims["same"]["whole"] is claims["flipped"]["whole"] is True
    assert claims["same"]["digest_rollout"] == claims["same"]["digest_train"] == claims["flipped"]["digest_rollout"]
    assert claims["flipped"]["first"]["request"] == 0
    assert 0 <= claims["flipped"]["kl_low"] <= claims["flipped"]["kl"] <= claims["flipped"]["kl_high"]
