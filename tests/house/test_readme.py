"""The README: short, its commands in its first lines; its snippet runs, its commands parse, its links lead somewhere."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.S)
COMMANDS = sorted({
    line.strip()
    for kind, block in BLOCKS
    if kind in ("", "sh", "bash", "console")
    for line in block.splitlines()
    if re.match(r"\s*(make|offdrift|accelerate) ", line)
})  # fmt: skip


def test_it_is_short_and_the_first_commands_stand_at_its_top():
    assert any("make train" in line for line in README.splitlines()[:15])
    assert any("offdrift demo" in line for line in README.splitlines()[:20])
    assert len(README.split()) <= 700
    prose = re.sub(r"```.*?```", "", README, flags=re.S)
    assert len(re.findall(r"(?<![\w.])\d[\d.,]*", prose)) <= 0.03 * len(prose.split())
    assert max(len(p.split()) for p in re.split(r"\n\s*\n", prose)) <= 100


@pytest.mark.parametrize("code", [b for kind, b in BLOCKS if kind == "python"], ids=lambda b: b[:30])
def test_python_snippets_run(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_snippets_and_commands():
    assert any(kind == "python" for kind, _ in BLOCKS)
    assert len(COMMANDS) >= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command):
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    words = words[words.index("train") if "train" in words else 1 :]
    done = subprocess.run([sys.executable, "-m", "offdrift", *words[: 2 if words[0] == "lab" else 1], "--help"], cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0
    for option in (w for w in words if w.startswith("--")):
        assert option.split("=")[0] in done.stdout, option
    for path in (w for w in words if w.endswith(".toml")):
        assert (ROOT / path).exists()


def test_every_relative_link_of_a_page_leads_to_a_file():
    """As GitHub reads it, where nothing stands but what is in the repository: the site makes pages of its own."""
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    dead, seen = [], 0
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").glob("*.txt")]:
        text = re.sub(r"`[^`\n]*`", "", hooks["FENCE"].sub("", page.read_text("utf-8")))
        for target in hooks["LINK"].findall(text):
            path = target.partition("#")[0]
            if path and not re.match(r"[a-z]+:", path):
                seen += 1
                dead += [f"{page.relative_to(ROOT)}: {target}"] * (not (page.parent / path).exists())
    assert seen > 500
    assert dead == []
