"""What a server renders and fills in: found with a server that is played, and with a real vLLM that holds the faults."""

import json

import pytest

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.server_side import server_findings, server_side
from offdrift.errors import NotOfferedError
from offdrift.models import load_model, save_for_engine, tiny_tokenizer
from offdrift.records.provenance import Sampling
from tests.command import command
from tests.engines.models import CACHE_MIB, tiny
from tests.engines.serving import serving
from tests.engines.test_openai_broken import VOCAB, Played, playing

TEXTS, IDS = ["a", "b"], [[5, 6, 7], [6, 7]]


class Filling(Played):
    """A server that renders texts, and has defaults of its own for what a request leaves open."""

    def __init__(self, **defaults) -> None:
        super().__init__()
        self.defaults = {"temperature": 1.0, "top_k": 0} | defaults
        self.end: int | None = None
        """A token at which responses end, unless the request says otherwise."""
        self.allows = True
        """Whether it draws from allowed tokens alone, where it is told to."""
        self.rendered: dict[str, list[int]] | None = dict(zip(TEXTS, IDS))

    def answer(self, path, body):
        if path == "/tokenize" and self.rendered is not None:
            return {"tokens": self.rendered[body["prompt"]]}
        return super().answer(path, body)

    def rows(self, params, length):
        tokens, logp, shown = super().rows(self.defaults | params, length)
        if self.allows and "allowed_token_ids" in params:
            tokens = params["allowed_token_ids"] * length
            logp = [0.0] * length
        if "ignore_eos" not in params and self.end in tokens:
            count = tokens.index(self.end) + 1
            tokens, logp = tokens[:count], logp[:count]
        return tokens, logp, shown


@pytest.fixture(scope="module")
def model():
    model, _ = load_model("tiny-qwen3", seed=0)
    model.config.vocab_size = VOCAB
    return model


def found(server: Played, model, ends: tuple[int, ...] = ()) -> dict:
    with playing(server):
        spec = EngineSpec.parse(f"openai:{server.url}")
        sampling = Sampling(16, stop_token_ids=ends)
        with Bench(model, tiny_tokenizer(), [[1, 2], [3]], sampling=sampling) as bench:
            return server_side(bench, spec, TEXTS, IDS)


def rules(answer: dict) -> list[str]:
    return [finding.rule for finding in server_findings(answer)]


def test_a_server_like_the_trainer_gives_no_finding(model):
    server = Filling()
    server.end = 1
    answer = found(server, model, ends=(1,))
    assert answer["prompts"] == {"same": True, "chat": False}
    assert answer["defaults"] == {"repeats": True, "neutral": True}
    assert (answer["ends"]["extra"], answer["ends"]["missing"]) == ([], [])
    assert rules(answer) == []


@pytest.mark.parametrize(("end", "extra", "missing"), [(2, [2], [1]), (None, [], [1])], ids=["another", "none"])
def test_a_server_is_asked_where_it_ends(model, end, extra, missing):
    """The tokenizer ends at 1; no response that was drawn has to hold either token."""
    server = Filling()
    server.end = end
    answer = found(server, model, ends=(1,))
    assert answer["ends"]["asked"] >= 2
    assert (answer["ends"]["extra"], answer["ends"]["missing"]) == (extra, missing)


def test_a_server_that_draws_what_it_likes_says_nothing_of_its_ends(model):
    server = Filling()
    server.allows = False
    assert found(server, model)["ends"] is None


@pytest.mark.parametrize("defaults", [{"temperature": 0.3}, {"top_k": 1}], ids=["temperature", "top_k"])
def test_defaults_that_change_what_is_drawn_are_found(model, defaults):
    answer = found(Filling(**defaults), model)
    assert answer["defaults"]["neutral"] is False
    assert rules(answer) == ["server_defaults"]


def test_an_end_is_found_unless_it_is_the_trainers(model):
    """Token 0 is the likeliest of all: 16 draws have it."""
    server = Filling()
    server.end = 0
    answer = found(server, model)
    assert answer["defaults"]["early"] is True
    assert rules(answer) == ["server_defaults"]
    again = Filling()
    again.end = 0
    assert rules(found(again, model, ends=(0,))) == []


def test_another_rendering_is_shown_from_the_first_token_that_differs(model):
    server = Filling()
    server.rendered["b"] = [6, 4, 7]
    answer = found(server, model)
    assert (answer["prompts"]["at"], answer["prompts"]["text"]) == (1, "b")
    (finding,) = server_findings(answer)
    assert (finding.rule, finding.cause, finding.severity) == ("server_prompt", "inputs_differ", "act")


def test_a_server_that_says_nothing_or_does_not_repeat_itself_is_not_accused(model):
    silent = Filling()
    silent.rendered = None
    assert found(silent, model)["prompts"] is None
    noisy, calls = Filling(temperature=0.3), iter(range(100))
    kept = noisy.rows
    noisy.rows = lambda params, length: kept({**params, "seed": next(calls)}, length)
    answer = found(noisy, model)
    assert answer["defaults"] == {"repeats": False, "neutral": None}
    assert rules(answer) == []


def test_an_engine_of_this_process_is_not_asked(model):
    with (
        Bench(load_model("tiny-qwen3", seed=0)[0], tiny_tokenizer(), [[1]], sampling=Sampling(2)) as bench,
        pytest.raises(NotOfferedError),
    ):
        server_side(bench, EngineSpec("transformers", "float32"), TEXTS, IDS)


FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16", "--max-logprobs", "-1",
    "--kv-cache-memory-bytes", str(CACHE_MIB * 2**20),
)  # fmt: skip


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_server_with_another_template_and_a_penalty_is_found_out(tmp_path, monkeypatch, capsys):
    """Its log-probs of the tokens that the check sends are right to the last bit that float32 has."""
    ours, theirs = tmp_path / "trainer", tmp_path / "server"
    tokenizer = tiny_tokenizer()
    for folder, template in ((ours, "{{ messages[0].content }}="), (theirs, "{{ messages[0].content }}")):
        tokenizer.chat_template = template
        save_for_engine(tiny("dense"), tokenizer, str(folder))
    settings = theirs / "generation_config.json"
    newline = tokenizer.encode("\n")[0]
    edited = {"repetition_penalty": 1.8, "eos_token_id": [tokenizer.eos_token_id, newline]}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **edited}))
    with serving(str(theirs), tmp_path, *FLAGS) as url:
        words = ("--max-prompts", "4", "--max-tokens", "16", "--factors", "none", "--out", str(tmp_path / "out"))
        command(monkeypatch, capsys, "check", "--model", str(ours), "--rollout", f"openai:{url}", *words)
    check = json.loads((tmp_path / "out" / "check.json").read_text())
    assert check["baseline"]["kl_mean"] < 1e-9
    by_rule = {f["rule"]: f for f in check["findings"]}
    assert set(by_rule) == {"server_prompt", "server_defaults", "generation_config", "ends_differ"}
    assert set(check["server"]["folder"]["generation"]) == {"repetition_penalty", "eos_token_id"}
    assert (check["server"]["ends"]["extra"], check["server"]["ends"]["missing"]) == ([newline], [])
    assert (check["verdict"]["level"], check["passed"]) == ("act", True)
    assert check["server"]["prompts"]["trainer"] == "="
