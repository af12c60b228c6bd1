"""The command line as a shell sees it: exit statuses, messages, help, and what all commands have in common."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from offdrift.cli import COMMANDS, EXTRAS, application, missing
from offdrift.cli.exit_codes import MEANINGS, ExitCode
from offdrift.records.recorder import write_log
from tests.audit.logs import drawn as logged
from tests.command import command
from tests.forked import forked

ROOT = Path(__file__).parents[1]
TINY_CHECK = (
    "check --model tiny-qwen3 --rollout transformers:bfloat16 --max-prompts 2 --max-tokens 4"
    " --factors none --max-kl 1e-9"
)
SMALL = ("warm_start.steps=0", "batches=16", "rollout.prompts=2", "rollout.samples=2", "log.eval_prompts=2", "lag.sync_every=1", "log.checkpoint_every=1")  # fmt: skip
"""Long enough that the second arm is still at it when the signal comes, on a busy machine too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a log of much drift and an audit of it."""
    place = tmp_path_factory.mktemp("shell")
    write_log(logged(drift=2.0, sequences=120, steps=6), place / "log" / "batch-0.parquet")
    assert forked("audit log --out audits/log -q", place).wait(180).returncode == 0
    return place


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    plain = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "140", "TERM": "dumb", "NO_COLOR": "1"}
    return {**os.environ, **plain, **more}


def shell(words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess:
    """Run `offdrift WORDS` in a shell."""
    line = f"{sys.executable} -m offdrift {words}"
    return subprocess.run(["bash", "-c", line], cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=180)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("audit nowhere.jsonl", ExitCode.ERROR, "nowhere.jsonl"),
        ("nix", ExitCode.USAGE, "nix"),
        ("watch log --until-idle 0.2 --every 0.05 --fail-on act", ExitCode.VERDICT, ""),
    ],
)
def test_a_shell_reads_the_exit_status(folder, words, code, said):
    done = shell(words, folder)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_value_of_the_wrong_type_is_one_message(folder, tmp_path):
    """In this process the suite's type checks would come first."""
    done = forked(f"train {ROOT}/recipes/tiny.toml --set arms.none.override.aggregate=x", folder, tmp_path).wait(180)
    assert done.returncode == ExitCode.ERROR
    assert "arms.none: aggregate = 'x': must be 'token_mean' or" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("bound --T 64 --delta 1e-4", ExitCode.FINE, ""),
        ("audit log --out /proc/nowhere", ExitCode.ERROR, "/proc/nowhere"),
        ("methods trm_mx", ExitCode.ERROR, "MethodError: no method 'trm_mx'; did you mean trm_max"),
        ("train nowhere.toml", ExitCode.ERROR, "RecipeError: cannot read recipe nowhere.toml"),
        ("train no[/x]where[b].toml", ExitCode.ERROR, "cannot read recipe no[/x]where[b].toml"),
        ("train TINY --set foo=1", ExitCode.ERROR, "unknown key 'foo'"),
        ("train TINY --set method=gpso", ExitCode.ERROR, "did you mean gspo"),
        ("train TINY --set task=summs", ExitCode.ERROR, "task = 'summs' is not known"),
        ("train TINY --set override.gate.high=1", ExitCode.ERROR, "override changes the values of method"),
        ("train TINY --arms nope", ExitCode.USAGE, "tiny has the arms none, trm_max"),
        ("report nowhere", ExitCode.ERROR, "RecordError"),
        ("bound", ExitCode.USAGE, "give --T"),
        ("sweep", ExitCode.USAGE, "Missing argument 'file'. For example: offdrift sweep recipes/sweep.toml --dry-run"),
        ("lab lag-law", ExitCode.USAGE, "For example: offdrift lab lag-law runs/staleness"),
        ("audit log --fail-on sometimes", ExitCode.USAGE, "sometimes"),
        ("audit log --columns reward", ExitCode.USAGE, "reward"),
        ("audit log --fail-on act", ExitCode.VERDICT, ""),
        ("lab bounds --pairs 100 --plant 0.5 --adversarial-steps 0", ExitCode.VERDICT, ""),
        (TINY_CHECK, ExitCode.VERDICT, ""),
    ],
)
def test_a_mistake_is_one_message_and_every_end_has_its_status(folder, monkeypatch, capsys, words, code, said):
    monkeypatch.chdir(folder)
    done = command(monkeypatch, capsys, *words.replace("TINY", str(ROOT / "recipes" / "tiny.toml")).split())
    assert done.code == code, done.stdout + done.stderr
    assert said in re.sub(r"\s*│?\n│?\s*", " ", done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_train_interrupt_and_resume(tmp_path):
    run = tmp_path / "run"
    changes = [w for change in SMALL for w in ("--set", change)]
    words = ["train", "recipes/tiny.toml", *changes, "--out", str(run), "--arms", "none,trm_max"]
    started = forked(words, ROOT, tmp_path)
    for line in started.lines(started.err):
        if "trm_max  L = -A" in line:  # the second arm begins
            started.send_signal(signal.SIGINT)
    done = started.wait(60)
    output = done.stdout + done.stderr
    assert done.returncode == 130, output
    printed = output.replace("\n", "")
    assert f"--arms none,trm_max --out {run} --resume" in printed, "the way back repeats the flags"
    assert "--set batches=16" in printed
    assert "Traceback" not in output
    refused = forked(words, ROOT, tmp_path).wait(60)
    assert refused.returncode == 2
    assert "already holds a run" in refused.stderr
    done = forked([*words, "--resume"], ROOT, tmp_path).wait(180)
    assert done.returncode == 0, done.stderr
    assert "already finished" in done.stderr
    assert str(run / "report.html") in done.stdout.replace("\n", "")
    table = json.loads((run / "run.json").read_text())["table"]
    assert [row["arm"] for row in table] == ["none", "trm_max"]
    assert (run / "report.html").stat().st_size > 500_000, "plotly.js is in it, packed"
    again = forked(["report", str(run)], ROOT, tmp_path).wait(60)
    assert again.returncode == 0
    assert all(word in again.stdout for word in ("Held-out", "reward", "trm_max", "Judged by"))  # headings fold


@pytest.mark.parametrize(("own", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_leave_the_core_to_others_unless_the_user_says_otherwise(own, policy):
    """OpenMP itself prints what it read when torch is imported after the command line began."""
    code = "import sys; sys.argv[1:] = ['--help']\nfrom offdrift import cli\ntry: cli.main()\nexcept SystemExit: import torch"
    kept = {k: v for k, v in environment(OMP_DISPLAY_ENV="TRUE").items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], env=kept | own, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr


@pytest.mark.slow
def test_an_interrupt_ends_with_130(folder):
    command = [sys.executable, "-u", "-m", "offdrift", "watch", "log", "--every", "0.05", "--json"]
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        started.stdout.readline()
        started.send_signal(signal.SIGINT)
        started.communicate(timeout=60)
    assert started.returncode == ExitCode.INTERRUPTED


def test_the_help_starts_with_the_first_command_of_the_readme(tmp_path):
    (first,) = re.findall(r"Start with: (.*?)\s*$", shell("--help", tmp_path).stdout, re.MULTILINE)
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(offdrift (?!--)\S+)", readme, re.MULTILINE)
    assert first == commands[0]


def test_the_table_of_exit_statuses_is_in_the_help_and_in_the_docs(tmp_path):
    text = " ".join(shell("--help", tmp_path).stdout.split())
    page = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    for code, meaning in MEANINGS.items():
        assert f"{code:d} {meaning}" in text
        assert f"| {code:d} | {meaning}" in page


# -- what all commands have in common -------------------------------------------------------------


def commands() -> dict[str, Any]:
    """Every command and group of commands by its words."""
    root = get_command(application())
    named = {"": root} | root.commands
    return named | {f"lab {name}": c for name, c in root.commands["lab"].commands.items()}


LEAVES = sorted(name for name in commands() if name not in ("", "lab"))


def options(name: str) -> set[str]:
    return {o for p in commands()[name].params for o in (*p.opts, *p.secondary_opts)}


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_has_the_common_options(name):
    assert {"--json", "--quiet", "-q", "--no-color"} <= options(name)


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_fits_80_columns_and_names_every_option_and_exit_status(monkeypatch, capsys, name):
    done = command(monkeypatch, capsys, *name.split(), "--help", width=80)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert done.code == 0
    assert max(map(len, lines)) <= 80
    for param in commands()[name].params:
        word = param.opts[-1] if param.param_type_name == "option" else param.name
        assert any(re.match(rf"  (-\w, )?{word}\b", line) for line in lines), f"{word} begins no row"
    status = " ".join(done.stdout.partition("Exit status: ")[2].split())
    told = {ExitCode(int(part.split()[0])) for part in status.split(" · ")}
    assert told >= set(ExitCode) - {ExitCode.VERDICT}
    decides = {"", "lab", "audit", "check", "watch", "methods", "lab bounds", "lab coverage", "lab three-policies"}
    assert (ExitCode.VERDICT in told) == (name in decides)


@pytest.mark.parametrize("name", LEAVES)
def test_the_examples_in_the_help_use_options_that_exist(monkeypatch, capsys, name):
    text = command(monkeypatch, capsys, *name.split(), "--help", width=80).stdout
    block = re.sub(r"\\\n\s*", "", text.partition("Examples\n")[2].partition("\n\n")[0])
    examples = [part for line in block.splitlines() for part in line.split("&&")]
    assert examples
    for words in map(shlex.split, examples):
        assert words[0] == "offdrift"
        used = {w.partition("=")[0] for w in words if w.startswith("--")}
        other = next(n for n in LEAVES if words[1:][: len(n.split())] == n.split())
        assert used <= options(other), words


CHEAP = (
    "audit log --out audits/again",
    "compare audits/log audits/log",
    "report audits/log",
    "watch log --until-idle 0.2 --every 0.05",
    "bound --T 64 --delta 1e-4",
    "bound --T 64 --solve delta",
    "lab length-bias --sequences 20",
    "lab routing --pairs 2 --steps 1",
    "methods",
    "methods gspo",
)


@pytest.mark.parametrize("words", CHEAP)
def test_the_last_line_says_what_to_do_next_and_stdout_may_be_for_a_machine(folder, monkeypatch, capsys, words):
    monkeypatch.chdir(folder)
    assert command(monkeypatch, capsys, *words.split()).stderr.splitlines()[-1].startswith("next: ")
    quiet = command(monkeypatch, capsys, *words.split(), "--quiet")
    assert (quiet.stderr, quiet.stdout != "") == ("", True)
    done = command(monkeypatch, capsys, *words.split(), "--json")
    texts = done.stdout.splitlines() if words.startswith("watch") else [done.stdout]
    assert [json.loads(text) for text in texts]


def test_no_color_is_plain(folder, tmp_path):
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": ""}
    colored = forked("audit log --out audits/color", folder, tmp_path, **terminal).wait(180)
    plain = forked("audit log --out audits/color --no-color", folder, tmp_path, **terminal).wait(180)
    colors = ("\x1b[31", "\x1b[32", "\x1b[33", "\x1b[1;3", "\x1b[9", "\x1b[38")
    assert any(c in colored.stdout for c in colors)
    assert not any(c in plain.stdout + plain.stderr for c in colors)


def test_a_shell_completes_commands(tmp_path):
    done = shell("", tmp_path, _OFFDRIFT_COMPLETE="complete_bash", COMP_WORDS="offdrift co", COMP_CWORD="1")
    assert done.stdout.split() == ["compare"]


@pytest.mark.parametrize(
    "words", [["--help"], ["methods"], ["methods", "gspo"], ["bound", "--T", "64", "--delta", "1"]]
)
def test_help_the_table_of_methods_and_bounds_do_not_wait_for_torch(words):
    code = (
        f"import sys; sys.argv = ['offdrift', *{words}]\n"
        "from offdrift.cli import main\n"
        "try: main()\n"
        "finally: print({'torch', 'pyarrow', 'transformers'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.stderr.strip().splitlines()[-1] == "set()"
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("absent", "words", "wanted"),
    [
        ("typer", "train tiny", "its commands need typer: pip install 'offdrift[cli]' for methods"),
        ("rich", "--help", "its commands need rich: pip install 'offdrift[cli]' for methods"),
        ("pyarrow", "audit log", "offdrift audit needs pyarrow: pip install 'offdrift[audit]'"),
        ("transformers", "train tiny", "offdrift train needs transformers: pip install 'offdrift[train]'"),
        ("accelerate", "report nowhere", "RecordError: nowhere is not a folder with arms.json, audit.json, run.json"),
        ("safetensors", "certify a b --fresh", "RecordError: a holds no answers"),
    ],
)
def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(folder, absent, words, wanted):
    code = f"import sys; sys.modules[{absent!r}] = None; sys.argv[1:] = {words.split()!r}\nfrom offdrift.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment(), capture_output=True, text=True, timeout=180)  # fmt: skip
    assert done.returncode == ExitCode.ERROR
    assert wanted in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("accelerate", "report", "train"),
        ("simpy", "audit", "plan"),
        ("pyarrow", "train", "train"),
        ("pyarrow", "bound", "audit"),
        ("torch", "bound", "cli"),
    ],
)
def test_the_extra_that_is_named_has_the_package(package, command, extra):
    assert missing(package, command).endswith(f"needs {package}: pip install 'offdrift[{extra}]'")


def test_the_version_is_printed(monkeypatch, capsys):
    done = command(monkeypatch, capsys, "--version")
    assert (done.code, done.stdout) == (ExitCode.FINE, f"offdrift {version('offdrift')}\n")


def test_every_command_has_an_extra():
    assert sorted(EXTRAS) == sorted(COMMANDS)


IN_A_DESTRUCTOR = """
import os, signal
from offdrift.cli.app import interruptible
check = interruptible()

class Dies:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))

del_me = Dies()
del del_me
print("went on")
try:
    check()
except KeyboardInterrupt:
    print("ended")
class Broken:
    def __del__(self):
        raise ValueError("a real fault")
Broken()
"""


ENDED = """
import os, signal, sys
import offdrift.audit.demo as demo
from offdrift.cli import main
demo.write_demo = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["offdrift", "demo"]
main()
"""


def test_the_signal_by_which_schedulers_end_a_job_is_an_interrupt_for_every_command(tmp_path):
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == ExitCode.INTERRUPTED, done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_inside_a_destructor_is_not_lost_and_shows_no_traceback():
    done = subprocess.run([sys.executable, "-c", IN_A_DESTRUCTOR], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["went on", "ended"]
    assert "KeyboardInterrupt" not in done.stderr
    assert "a real fault" in done.stderr, "other reports are left alone"
