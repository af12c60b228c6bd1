"""Every option and argument of every command, given what it cannot be: a message and a status, never a traceback.

Commands and their parameters are read off the application, so that a new one is covered as soon as it exists. Heavy
commands name a model that is not there, so that what is refused is refused before, and what is not ends at it.
"""

import re
import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.main import get_command

import offdrift_lab.train.loop.loop  # noqa: F401 - an import that an alarm interrupts leaves halves of modules
from offdrift import cli
from offdrift.cli import application
from offdrift.cli.exit_codes import ExitCode
from offdrift.records import Provenance, Rollouts, Sampling
from offdrift.records.recorder import write_log
from offdrift.records.store import write
from tests.audit.logs import drawn
from tests.command import command

SECONDS = 60
"""What one command may take: all of them refuse at once, or do next to nothing."""
NOWHERE = "model=./nowhere"
VALID: dict[str, str] = {
    "check": "--model ./nowhere --max-prompts 1 --max-tokens 2 --factors none",
    "plan": "--schedule sync --this-split --bounds 1 --set run.updates=2 --set run.warmup=0",
    "train": f"recipe.toml --set {NOWHERE}",
    "sweep": "sweep.toml --dry-run",
    "watch": "log --until-idle 0.05 --every 0.05",
    "demo": "a_folder/demo",
    "docs": "rules",
    "audit": "log --sample-mib 1",
    "compare": "audits/log audits/log",
    "report": "audits/log",
    "certify": "rollouts.parquet --model ./nowhere",
    "methods": "",
    "rules": "other.toml",
    "schema": "recipe",
    "schedules": "",
    "bound": "--T 64 --delta 1e-4",
    "lab bounds": "--pairs 1 --adversarial-steps 0",
    "lab coverage": "--repetitions 1 --worlds benign",
    "lab frontier": "--horizons 2 --kl 0.1 --batch 8 --tokens 64 --methods none --testbeds nowhere",
    "lab routing": "--pairs 2 --steps 1",
    "lab masking": "--pairs 2 --horizons 2",
    "lab three-policies": "--triples 9",
    "lab flips": "--tasks nowhere --horizons 2 --counts 3 --pairs 2",
    "lab length-bias": "--sequences 8 --recording nowhere.npz",
    "lab lengths": "",
    "lab lag-law": "nowhere",
    "lab collapse": "nowhere",
}
"""Arguments of each command that are right, or wrong at the very end."""
TEXTS = ("", "nope", "-1", "nan", "a.b=c", "\udcff[")
"""Words for every option: of the wrong type, out of range, no pair, no text."""
FILES = ("missing.toml", "a_folder", "empty", "garbage.bin", "list.json", "bad.toml", "other.toml", "flipped.parquet", "recipe.toml/below")  # fmt: skip
"""Paths for every option: damaged, of another kind, or below what is no folder."""


def walk(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    commands = getattr(group, "commands", None)
    if commands is None:
        yield " ".join(path), group
    for name, sub in (commands or {}).items():
        yield from walk(sub, (*path, name))


GROUP = get_command(application())
COMMANDS = dict(walk(GROUP))
COMMON = {"as_json", "quiet", "no_color"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log, an audit of it, and files that are damaged in many ways."""
    folder = tmp_path_factory.mktemp("damaged")
    write_log(drawn(drift=0.1, sequences=40, steps=2), folder / "log" / "batch-0.parquet")
    recipes = Path(__file__).parents[1] / "recipes"
    (folder / "recipe.toml").write_text((recipes / "tiny.toml").read_text())
    (folder / "sweep.toml").write_text('name = "grid"\nrecipe = "recipe.toml"\nseeds = 2\n')
    (folder / "a_folder").mkdir()
    (folder / "empty").touch()
    (folder / "garbage.bin").write_bytes(zlib.compress(b"0123456789" * 99) * 3)
    (folder / "bad.json").write_text('{"a": [1, 2')
    (folder / "list.json").write_text("[1, null, {}]")
    (folder / "bad.toml").write_text("a = [1,\n= 2")
    (folder / "other.toml").write_text('[a]\nb = 1\nc = "x"\n')
    pq.write_table(pa.table({"x": [1.0, 2.0], "y": ["a", None]}), folder / "other.parquet")
    whole = (folder / "log" / "batch-0.parquet").read_bytes()
    cuts = torch.arange(9)
    write(Rollouts(
        tokens=torch.arange(8) % 2, logp_rollout=torch.full((8,), -0.7), cu_seqlens=cuts,
        rollout_version=torch.zeros(8, dtype=torch.int64), prompt_tokens=torch.arange(8), prompt_cu_seqlens=cuts,
        group_ids=torch.arange(8), finish=("length",) * 8, rewards=torch.ones(8),
        provenance=Provenance("coin", "0", "none", "float32", None, Sampling(max_tokens=1)),
    ), folder / "rollouts.parquet")  # fmt: skip
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[-300] ^= 0xFF
    (folder / "flipped.parquet").write_bytes(bytes(flipped))
    return folder


@contextmanager
def limited(words: list[str]) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"not done after {SECONDS} s: {words}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def cases(name: str) -> Iterator[tuple[str, list[str], str]]:
    """Each parameter's name, the words of the command with it, and the value that it was given."""
    valid, sub = VALID[name].split(), COMMANDS[name]
    arguments = [p for p in sub.params if p.param_type_name == "argument"]
    given = 0
    while given < len(valid) and not valid[given].startswith("-"):
        given += 1
    for p in sub.params:
        if p.name in COMMON or p.name == "help":
            continue
        for value in (*TEXTS, *FILES):
            if p.param_type_name == "argument":
                at = arguments.index(p)
                rest = [*valid[given:], *(["--"] * value.startswith("-")), *valid[:at], value, *valid[at + 1 : given]]
                yield p.name, [*name.split(), *rest], value
            elif getattr(p, "is_flag", False):
                yield p.name, [*name.split(), *valid, p.opts[0]], ""
                break
            else:
                yield p.opts[0], [*name.split(), *valid, p.opts[0], *[value] * p.nargs], value


def test_every_command_is_driven():
    assert VALID.keys() == COMMANDS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("lab ") else name for name in VALID]
)
def test_what_a_parameter_cannot_be_is_one_message(name, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no name is looked for in the network
    monkeypatch.setattr(cli, "application", lambda *_: GROUP)  # built once, not for each of the cases
    if name in ("compare", "report"):
        assert command(monkeypatch, capsys, "audit", "log", "--out", "audits/log", "-q").code == 0
    failures = []
    for field, words, value in cases(name):
        try:
            with limited(words):
                done = command(monkeypatch, capsys, *words)
        except BaseException as error:
            capsys.readouterr()
            failures.append(f"{words}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if done.code not in set(ExitCode) or "Traceback" in done.stderr:
            failures.append(f"{words}: status {done.code}")
        if done.code in (ExitCode.ERROR, ExitCode.USAGE):
            said = done.stderr.replace("_", "-")
            named = [field.replace("_", "-").strip("-"), value[:40].replace("_", "-"), "nowhere"]
            named += [repr(part) for part in re.split("[.=]", value)]
            named += ["''", ": . "] * (not value) + ["\\udcff"] * ("\udcff" in value)
            if len(done.stderr.strip()) < 20 or not any(x and x in said for x in named):
                failures.append(f"{words}: the message names neither the option nor its value: {done.stderr[:200]}")
    assert not failures, "\n".join(failures)
