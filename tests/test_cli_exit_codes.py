"""Every exit status as a shell sees it, and what all commands have in common."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from offdrift.cli import application
from offdrift.cli.exit_codes import MEANINGS, ExitCode
from offdrift.records.recorder import write_log
from tests.audit.logs import drawn as logged
from tests.command import command

ROOT = Path(__file__).parents[1]
TINY_CHECK = (
    "check --model tiny-qwen3 --rollout transformers:bfloat16 --max-prompts 2 --max-tokens 4"
    " --factors none --max-kl 1e-9"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a log of much drift and an audit of it."""
    place = tmp_path_factory.mktemp("shell")
    write_log(logged(drift=2.0, sequences=120, steps=6), place / "log" / "batch-0.parquet")
    shell("audit log --out audits/log -q", place)
    return place


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "100", **more}


def shell(words: str, cwd: Path, **more: str) -> subprocess.CompletedProcess:
    """Run `offdrift WORDS` in a shell."""
    line = f"{sys.executable} -m offdrift {words}"
    return subprocess.run(["bash", "-c", line], cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=180)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("bound --T 64 --delta 1e-4", ExitCode.FINE),
        ("audit nowhere.jsonl", ExitCode.ERROR),
        ("audit log --out /proc/nowhere", ExitCode.ERROR),
        ("nix", ExitCode.USAGE),
        ("bound", ExitCode.USAGE),
        ("audit log --fail-on sometimes", ExitCode.USAGE),
        ("audit log --columns reward", ExitCode.USAGE),
        ("audit log --fail-on act", ExitCode.VERDICT),
        ("watch log --until-idle 0.2 --every 0.05 --fail-on act", ExitCode.VERDICT),
        ("lab bounds --pairs 500 --plant 0.5 --adversarial-steps 0", ExitCode.VERDICT),
        (TINY_CHECK, ExitCode.VERDICT),
    ],
)
def test_a_shell_reads_the_exit_status(folder, words, code):
    done = shell(words, folder)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_interrupt_ends_with_130(folder):
    command = [sys.executable, "-u", "-m", "offdrift", "watch", "log", "--every", "0.05", "--json"]
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        started.stdout.readline()
        started.send_signal(signal.SIGINT)
        started.communicate(timeout=60)
    assert started.returncode == ExitCode.INTERRUPTED


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
    decides = {"", "lab", "audit", "check", "watch", "lab bounds", "lab coverage"}
    assert (ExitCode.VERDICT in told) == (name in decides)


@pytest.mark.parametrize("name", LEAVES)
def test_the_examples_in_the_help_use_options_that_exist(monkeypatch, capsys, name):
    text = command(monkeypatch, capsys, *name.split(), "--help", width=80).stdout
    block = text.partition("Examples\n")[2].partition("\n\n")[0]
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
    "methods",
    "methods gspo",
)


@pytest.mark.parametrize("words", CHEAP)
def test_the_last_line_says_what_to_do_next_unless_quiet(folder, monkeypatch, capsys, words):
    monkeypatch.chdir(folder)
    last = command(monkeypatch, capsys, *words.split()).stderr.splitlines()[-1]
    assert last.startswith("next: ")
    quiet = command(monkeypatch, capsys, *words.split(), "--quiet")
    assert quiet.stderr == ""
    assert quiet.stdout


@pytest.mark.parametrize("words", CHEAP)
def test_with_json_stdout_is_for_a_machine(folder, monkeypatch, capsys, words):
    monkeypatch.chdir(folder)
    done = command(monkeypatch, capsys, *words.split(), "--json")
    texts = done.stdout.splitlines() if words.startswith("watch") else [done.stdout]
    assert [json.loads(text) for text in texts]


def test_no_color_is_plain(folder):
    colored = shell("audit log --out audits/color", folder, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="")
    plain = shell("audit log --out audits/color --no-color", folder, FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="")  # fmt: skip
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
