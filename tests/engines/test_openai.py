"""The client engine against a real vLLM server: started here on a free port of this machine."""

import json
import urllib.request

import pytest
import torch

from offdrift.engines.server.client import measured_mode
from offdrift.engines.server.engine import OWN_METHOD, OpenAIEngine
from offdrift.engines.verify_sync import verify_sync
from offdrift.errors import EngineError, SyncError
from offdrift.models import save_for_engine, tiny_tokenizer
from tests.command import command
from tests.engines.contract import PLAIN, PROMPTS, SAMPLINGS, EngineContract
from tests.engines.models import CACHE_MIB, VOCAB, tiny
from tests.engines.serving import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "64",
    "--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    "--kv-cache-memory-bytes", str(CACHE_MIB * 2**20), "--enable-scale-out",
    "--worker-extension-cls", "offdrift.engines.vllm.worker.Worker",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A checkpoint with a tokenizer, as `check --model` and the server open it."""
    path = str(tmp_path_factory.mktemp("served"))
    save_for_engine(tiny("dense"), tiny_tokenizer(), path)
    return path


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    """A vLLM server on that checkpoint; ended by its process id."""
    with serving(folder, tmp_path_factory.mktemp("log"), *FLAGS) as address:
        yield address


@pytest.fixture(scope="module")
def model():
    return tiny("dense")


def _engine(url: str, **options) -> OpenAIEngine:
    return OpenAIEngine(url, **{"vocab_size": VOCAB, "sync": True, **options})


@pytest.fixture(scope="module")
def built(url):
    engine = _engine(url)
    yield tiny("dense"), engine, True
    engine.close()


class TestCompletions(EngineContract):
    """`/v1/completions`, which gives no hidden states and cannot be led along given tokens."""

    DRAWS = 500  # one request each

    test_hidden_states_and_their_head_are_the_full_rows = None
    test_hidden_states_of_ragged_responses_reproduce_their_log_probs = None
    test_the_support_is_what_the_recorded_distribution_has_probability_on = None
    test_ratios_on_the_support_are_one_at_equal_weights_and_otherwise_the_mass_that_was_kept = None
    test_hidden_states_keep_the_head_that_sampled = None
    test_its_own_draw_is_recorded_again_as_it_was = None
    test_given_tokens_are_recorded_as_the_weights_say = None
    test_a_given_token_that_a_filter_excludes_is_refused = None

    @pytest.mark.parametrize("evidence", ["full", 20])
    def test_evidence_above_the_memory_limit_is_refused_with_the_way_out(self, engine, evidence, monkeypatch):
        monkeypatch.setattr(engine, "evidence_limit_mib", 0)
        with pytest.raises(EngineError, match=r"limit 0 MiB.*evidence = 20.*evidence_limit_mib"):
            engine.generate(PROMPTS, PLAIN, seed=17, evidence=evidence)

    def test_no_support_is_recorded(self, engine):
        assert engine.generate(PROMPTS, SAMPLINGS["all"], seed=0).support is None

    def test_hidden_states_are_refused(self, engine):
        with pytest.raises(EngineError, match="no hidden states"):
            engine.generate(PROMPTS, PLAIN, seed=0, evidence="hidden")


# -- what the server says of itself -----------------------------------------------------------------


def test_the_server_is_described_in_every_record(url, folder):
    rollouts = _engine(url).generate(PROMPTS, PLAIN, seed=0)
    said = rollouts.provenance
    assert said.engine_version == "vllm 0.32.0"
    assert (said.model, said.dtype, said.quantization) == (folder, "float32", None)
    assert said.logprobs == "processed"


def test_measuring_the_kind_of_log_probs_agrees_with_what_the_server_says(url):
    engine = _engine(url)
    assert engine.served.mode == "processed"
    engine._mode = None  # as if it were silent
    assert engine.logprobs_mode(PROMPTS[0]) == "processed"
    assert measured_mode(lambda s: engine._drawn([PROMPTS[1]], s, 0, 20, "raw")) == "processed"


def test_the_second_way_of_asking_gives_the_same_rollouts(url):
    a, b = _engine(url), _engine(url, api="generate")
    for sampling in (PLAIN, SAMPLINGS["all"]):
        for evidence in ("full", 5):
            x, y = (e.generate(PROMPTS, sampling, seed=3, evidence=evidence) for e in (a, b))
            assert torch.equal(x.tokens, y.tokens)
            torch.testing.assert_close(x.logp_rollout, y.logp_rollout, atol=2e-6, rtol=0)
            torch.testing.assert_close(x.evidence.logp, y.evidence.logp, atol=2e-6, rtol=0)


def test_a_model_that_is_not_served_and_another_dtype_are_refused(url, folder):
    with pytest.raises(EngineError, match=rf"serves '{folder}' and no model 'other'"):
        _engine(url, model="other")
    with pytest.raises(EngineError, match=r"computes in float32, not in bfloat16.*--dtype bfloat16"):
        _engine(url, dtype="bfloat16")


def test_what_does_not_fit_or_exist_is_refused_before_it_reaches_the_server(url):
    engine = _engine(url)
    with pytest.raises(EngineError, match="token id 64, the vocabulary has 64"):
        engine.generate([[1, 64]], PLAIN, seed=0)
    with pytest.raises(EngineError, match="exceed the 256 tokens"):
        engine.generate([[1] * 250], PLAIN, seed=0)
    assert len(engine.generate([[1] * 244], PLAIN, seed=0).tokens) == 12


def test_a_server_without_routing_says_so(url):
    engine = _engine(url)
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        engine.routes(engine.generate(PROMPTS, PLAIN, seed=0))


# -- weights --------------------------------------------------------------------------------------


def _post(url: str, path: str, **body) -> None:
    sent = json.dumps(body).encode()
    there = url.removesuffix("/v1") + path
    asked = urllib.request.Request(there, sent, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60):
        pass


@pytest.mark.parametrize("api", ["completions", "generate"])
def test_weights_that_somebody_else_loads_are_noticed(url, model, api):
    engine = _engine(url, api=api)
    engine.load_weights(model.named_parameters(), version=3)
    assert engine.generate(PROMPTS, PLAIN, seed=0).rollout_version.tolist() == [3] * 96
    _post(url, "/update_weight_version", new_version="theirs")
    with pytest.raises(EngineError, match=r"holds weights 'theirs'.*expected 'offdrift-"):
        engine.generate(PROMPTS, PLAIN, seed=0)
    engine.load_weights(model.named_parameters(), version=4)
    assert engine.generate(PROMPTS, PLAIN, seed=0).rollout_version.tolist() == [4] * 96


def test_weights_that_change_between_the_checks_are_noticed_in_the_answers(url, model, monkeypatch):
    engine = _engine(url, api="generate")
    engine.load_weights(model.named_parameters(), version=0)
    label = engine._weights.label
    _post(url, "/update_weight_version", new_version="theirs")
    monkeypatch.setattr(engine._weights, "read", lambda: label)
    with pytest.raises(EngineError, match="holds weights 'theirs'"):
        engine.generate(PROMPTS, PLAIN, seed=0)
    monkeypatch.undo()
    engine.load_weights(model.named_parameters(), version=0)


def test_without_our_worker_vllm_keeps_the_tied_head_on_cpus_and_that_is_caught(url, model, monkeypatch):
    monkeypatch.setattr("offdrift.engines.server.engine.OWN_METHOD", "no_such_method")
    with pytest.raises(SyncError, match=r"model\.embed_tokens\.weight \(differ by"):
        verify_sync(_engine(url), model, PROMPTS, PLAIN, seed=0)
    monkeypatch.undo()
    assert OWN_METHOD == "offdrift_load"
    _engine(url).load_weights(model.named_parameters(), version=0)


# -- the commands ---------------------------------------------------------------------------------


def test_check_finds_a_float32_server_equal_to_its_checkpoint(url, folder, model, tmp_path, monkeypatch, capsys):
    from tests.command import command

    _engine(url).load_weights(model.named_parameters(), version=0)
    words = ("check", "--model", folder, "--rollout", f"openai:{url}", "--max-prompts", "6", "--max-tokens", "12")
    words += ("--factors", "off_by_one", "--max-kl", "1e-5", "--out", str(tmp_path))
    done = command(monkeypatch, capsys, *words)
    assert done.code == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "check.json").read_text())
    assert 48 < found["tokens"] <= 72  # a response may end early
    assert found["evidence"] == "FullVocab"
    assert 0 <= found["baseline"]["kl_mean"] < 1e-6
    assert found["rollout"]["engine_version"] == "vllm 0.32.0"
    assert found["rollout"]["spec"] == f"openai:{url},dtype=auto"
    row = found["deterministic"]["rollout"]
    assert row["text"].startswith(("yes, as it is", "no: "))
    assert row["deterministic"] == row["text"].startswith("yes")
    for compared in ("repeat", "batch"):
        assert 0 <= row[compared]["abs_log_ratio_max"] < 1e-4
        assert row[compared]["same_tokens_frac"] > 0.5


def test_train_draws_from_the_server_and_gives_it_weights(url, folder, tmp_path):
    from offdrift.records import store
    from offdrift_lab.train.loop.loop import train
    from offdrift_lab.train.settings.recipe import check_recipe

    recipe = check_recipe(
        {
            "name": "served",
            "model": folder,
            "batches": 3,
            "method": "token_tis",
            "rollout": {
                "engine": "openai",
                "url": url,
                "dtype": "float32",
                "prompts": 4,
                "samples": 2,
                "max_tokens": 8,
            },
            "lag": {"sync_every": 2},
            "optim": {"lr": 1e-3},
            "log": {"eval_every": 3, "eval_prompts": 4, "trackers": []},
        },
        source="test",
    )
    train(recipe, tmp_path / "run")
    files = sorted(f for f in (tmp_path / "run").rglob("batch-*.parquet") if f.parent.name != "log")
    batches = [store.read(f) for f in files]
    assert [set(b.rollout_version.tolist()) for b in batches] == [{0}, {0}, {2}]
    assert {b.provenance.engine for b in batches} == {"openai"}


def test_train_plays_episodes_with_the_server(url, folder, tmp_path, monkeypatch):
    from tests_lab.train.conftest import Echo, check_run_in_turns, short_arms, small_recipe

    from offdrift.models import load_model
    from offdrift_lab.train.data.environments import ENVIRONMENTS
    from offdrift_lab.train.loop.loop import train

    short_arms(monkeypatch)
    monkeypatch.setitem(ENVIRONMENTS, "echo", Echo())
    rollout = {"engine": "openai", "url": url, "dtype": "float32", "prompts": 2, "samples": 4, "max_tokens": 10, "max_turns": 3}  # fmt: skip
    recipe = small_recipe(model=folder, task="echo", rollout=rollout, batches=3, optim={"lr": 1e-3})
    train(recipe, tmp_path / "run")
    check_run_in_turns(tmp_path / "run/arms/trm_max", *load_model(folder, seed=0), engine="openai")


# -- which weights it holds -------------------------------------------------------------------------


@pytest.fixture
def steps(url, model, tmp_path):
    """Folders of two steps of a run; the server is given the older one's weights."""
    torch.manual_seed(5)
    save_for_engine(model, tiny_tokenizer(), tmp_path / "step_4")
    with torch.no_grad():
        for weight in (newer := tiny("dense")).parameters():
            weight.add_(0.02 * weight.square().mean().sqrt() * torch.randn_like(weight))
    save_for_engine(newer, tiny_tokenizer(), tmp_path / "step_6")
    engine = _engine(url)
    engine.load_weights(model.named_parameters(), version=4)
    yield tmp_path, engine, newer
    engine.load_weights(model.named_parameters(), version=0)
    engine.close()


def test_tokens_that_the_server_reads_have_the_log_probs_that_it_draws_them_with(url):
    engine = _engine(url)
    drawn = engine.generate(PROMPTS, PLAIN, seed=0)
    read = engine.forced(drawn)
    assert torch.equal(read.tokens, drawn.tokens)
    assert torch.allclose(read.logp_rollout, drawn.logp_rollout, atol=1e-5)
    greedy = engine.generate(PROMPTS, SAMPLINGS["all"], seed=0)
    assert not torch.allclose(engine.forced(greedy).logp_rollout, greedy.logp_rollout, atol=1e-3)
    assert engine.asleep() is False
    engine.close()


def test_the_command_names_the_older_checkpoint_that_a_server_holds_and_passes_the_right_one(
    url, steps, monkeypatch, capsys
):
    root, engine, newer = steps
    words = ("check", "--rollout", f"vllm-server:{url}", "--max-prompts", "12", "--max-tokens", "16", "--out", str(root / "out"))  # fmt: skip
    stale = command(
        monkeypatch, capsys, *words, "--checkpoint", str(root / "step_6"), "--earlier", str(root / "step_4")
    )
    assert stale.code == 3, stale.stderr
    kept = json.loads((root / "out" / "check.json").read_text())
    assert kept["live"]["state"] == "not held"
    assert f"{root}/step_4, 2 steps behind" in kept["live"]["text"]
    engine.load_weights(newer.named_parameters(), version=6)
    right = command(
        monkeypatch, capsys, *words, "--checkpoint", str(root / "step_6"), "--earlier", str(root / "step_4")
    )
    assert right.code == 0, right.stderr
    kept = json.loads((root / "out" / "check.json").read_text())
    assert kept["live"]["state"] == "held"
    assert kept["passed"] is True
    assert kept["live"]["weight_label"].startswith("offdrift-")
    assert kept["live"]["greedy_agreement"] == 1.0


def test_the_command_names_the_part_that_stayed_behind_in_a_server(url, steps, model, monkeypatch, capsys):
    root, engine, newer = steps
    mixed = {n: w for n, w in newer.named_parameters() if ".layers.1." not in n}
    old = {n: w for n, w in model.named_parameters() if ".layers.1." in n}
    engine.load_weights((mixed | old).items(), version=6)
    words = ("check", "--rollout", f"openai:{url}", "--max-prompts", "12", "--max-tokens", "16", "--out", str(root / "out"))  # fmt: skip
    done = command(monkeypatch, capsys, *words, "--checkpoint", str(root / "step_6"), "--earlier", str(root / "step_4"))
    assert done.code == 3, done.stderr
    kept = json.loads((root / "out" / "check.json").read_text())
    assert kept["live"]["part"]["name"] == "model.layers.1"
    assert "model.layers.1 stayed behind" in done.stdout
