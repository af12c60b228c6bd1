"""Every code block of the documentation is run or parsed: Python, commands, recipes, JSON and YAML."""

import ast
import doctest
import importlib
import json
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from offdrift.errors import OffdriftError
from offdrift.show.findings import SIDES
from tests.house.test_evidence import parsed

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOK = runpy.run_path(str(ROOT / "docs" / "notebook.py"))
RUN_ELSEWHERE = {
    "README.md": "tests/house/test_readme.py",
    "CONTRIBUTING.md": "tests/house/test_contributing.py",
    "docs/certificates.md": "tests/house/test_certificates_doc.py",
    "docs/integrations/areal.md": "tests/adapters/test_rebound_docs.py",
    "docs/integrations/custom.md": "tests/records/test_record.py",
    "docs/integrations/nemo-rl.md": "tests/adapters/test_rebound_docs.py",
    "docs/integrations/openrlhf.md": "tests/adapters/test_rebound_docs.py",
    "docs/integrations/skyrl.md": "tests/adapters/test_skyrl.py",
    "docs/integrations/trl.md": "tests/adapters/test_trl.py",
    "docs/integrations/verl.md": "tests/adapters/test_verl_config.py",
    "docs/your-own-method.md": "tests_lab/test_your_own_method.py",
}
"""Pages with Python that another test runs, because it needs a framework, or for what it prints."""
FRAGMENTS = {
    "docs/logs.md": "arrays of the reader's own loop",
    "docs/speculative.md": "policy and drafter of the reader",
}
"""Pages whose Python leaves something to the reader: parsed, and what it imports exists."""
OTHER_TOML = {
    "docs/integrations/prime-rl.md": "a configuration of prime-rl",
}
"""Pages with TOML that is no recipe."""
SHELLS = ("sh", "bash", "shell", "console")
LANGUAGES = {*SHELLS, "", "python", "toml", "json", "yaml", "diff", "text", "math"}


class Block(NamedTuple):
    """A block of code: where it stands, its language, and its text."""

    page: str
    line: int
    language: str
    text: str


def blocks(text: str, page: str) -> Iterator[Block]:
    """Fenced blocks, and indented ones as blocks without a language."""
    for match in re.finditer(r"^```([\w-]*)[^\n]*\n(.*?)^```[ \t]*$", text, re.MULTILINE | re.DOTALL):
        yield Block(page, text[: match.start()].count("\n") + 1, match[1], match[2])
    unfenced = re.sub(r"^```.*?^```[ \t]*$", lambda m: "\n" * m[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)
    for match in re.finditer(r"(?<=\n\n)((?:    [^\n]*\n)+)", unfenced):
        yield Block(
            page, unfenced[: match.start()].count("\n") + 1, "", re.sub(r"^    ", "", match[1], flags=re.MULTILINE)
        )


BLOCKS = [b for path in PAGES for b in blocks(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())]
BLOCKS += blocks(NOTEBOOK["page"](), "docs/first-audit.ipynb")


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def name(block: Block) -> str:
    return f"{block.page}:{block.line}"


def commands(block: Block) -> Iterator[str]:
    """Lines that run offdrift, joined where they go on, without what is around the command."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    shell = block.language in SHELLS
    for line in text.splitlines():
        if line.startswith("offdrift ") if block.language == "" or shell else False:
            yield line
        elif line.startswith("$ offdrift "):
            yield line.removeprefix("$ ")


COMMANDS = [(name(block), line) for block in BLOCKS for line in commands(block)]


def test_there_is_something_to_check():
    assert len(BLOCKS) > 150
    assert len(COMMANDS) > 80
    assert len(of("python")) > 25


def test_every_block_names_a_language_that_is_checked():
    assert [name(block) for block in BLOCKS if block.language not in LANGUAGES] == []


@pytest.mark.parametrize(("place", "line"), COMMANDS, ids=[f"{p} {c[:40]}" for p, c in COMMANDS])
def test_a_command_can_be_read(place, line, monkeypatch):
    """Placeholders in capitals, `...` and what stands in brackets are the reader's."""
    monkeypatch.chdir(ROOT)
    line = re.split(r"   +| && | > |[|;]", line.split(" #")[0])[0]
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "..."]
    if (
        (words and words[0].isupper())
        or words[:1] in (["--help"], ["--install-completion"], ["--version"])
        or words[-1:] == ["--help"]
    ):
        return
    if place.startswith(("docs/commands.md", "docs/command-line.md")):
        words = list(takewhile(lambda word: not word.startswith("("), words))
    parsed(words)


@pytest.mark.parametrize("block", of(*SHELLS), ids=name)
def test_a_shell_reads_it(block):
    script = "\n".join(line.removeprefix("$ ") for line in block.text.splitlines())
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", of("python"), ids=name)
def test_python_is_python_and_what_it_imports_of_ours_exists(block):
    if block.text.startswith(">>>"):
        return
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offdrift"):
            room = importlib.import_module(node.module)
            for alias in node.names:
                lazy = (
                    alias.name in getattr(room, "__all__", ())
                    or f'name != "{alias.name}"' in Path(room.__file__).read_text()
                )
                assert lazy or hasattr(room, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


RUN = [b for b in of("python") if b.page not in {*RUN_ELSEWHERE, *FRAGMENTS, "docs/first-audit.ipynb"}]


@pytest.mark.parametrize("block", RUN, ids=name)
def test_python_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if block.text.startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(block.text, {}, name(block), None, 0)
        assert doctest.DocTestRunner().run(test).failed == 0
        return
    with torch.random.fork_rng():
        exec(compile(block.text, name(block), "exec"), {"__name__": "__main__"})


def test_blocks_that_this_test_does_not_run_are_run_by_another_or_have_a_reason():
    pages = {block.page for block in of("python")}
    for page, test in RUN_ELSEWHERE.items():
        assert page in pages
        assert Path(page).name in (ROOT / test).read_text("utf-8")
    assert {*FRAGMENTS} <= pages


@pytest.mark.parametrize("block", of("toml"), ids=name)
def test_toml_is_toml_and_a_recipe_has_these_settings(block):
    settings = tomllib.loads(block.text)
    if block.page in OTHER_TOML:
        return
    api = json.loads((ROOT / "docs" / "api.json").read_text("utf-8"))
    known = {*api["recipe settings"], *api["sweep settings"], "method", "override"}  # the last two: a recipe of one arm
    whole = {key for key in known if not any(other.startswith(f"{key}.") for other in known)}  # no part has settings
    patterns = [
        re.compile(key.replace(".", r"\.").replace("NAME", r"[\w-]+") + r"(\..+)?" * (key in whole)) for key in known
    ]
    unknown = [key for key in flat(settings) if not any(p.fullmatch(key) for p in patterns)]
    assert unknown == []


def flat(table: dict, before: str = "") -> Iterator[str]:
    """Dotted keys of what is set."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"


@pytest.mark.parametrize("block", of("json", "yaml"), ids=name)
def test_json_and_yaml_are_what_they_say(block):
    if block.language == "yaml":
        yaml = pytest.importorskip("yaml")
        assert yaml.safe_load(block.text)
        return
    try:
        assert json.loads(block.text)
    except ValueError:
        assert [json.loads(line) for line in block.text.splitlines()]


@pytest.mark.parametrize("block", of("diff"), ids=name)
def test_a_diff_has_both_sides(block):
    lines = [line for line in block.text.splitlines() if line]
    assert {line[0] for line in lines} <= {"+", "-", " "}
    assert {"+", "-"} <= {line[0] for line in lines}


@pytest.mark.slow
def test_the_notebook_runs_and_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = NOTEBOOK["cells"]()
    fresh = list(NOTEBOOK["printed"]())
    assert len(fresh) == len(cells) > 8
    for cell, text in zip(cells, fresh, strict=True):
        # Drawn numbers may round otherwise on another processor; verdicts and findings do not.
        verdicts = [line for line in NOTEBOOK["stored"](cell).splitlines() if line.startswith(("╭", "■", "○", "stop:"))]
        assert [line for line in (text or "").splitlines() if line.startswith(("╭", "■", "○", "stop:"))] == verdicts
    stored = "".join(map(NOTEBOOK["stored"], cells))
    assert f"■ Stop  {SIDES['raw_logprobs']}" in stored
    assert "✓ OK" in stored


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```rust\nfn\n```\n", "language"),
        ("```sh\noffdrift audit PATH --no-such-option\n```\n", "command"),
        ("text\n\n    offdrift trian recipes/tiny.toml\n\n", "command"),
        ("```toml\n[optim]\nlearning_rate = 1\n```\n", "setting"),
        ("```python\nfrom offdrift import no_such_name\n```\n", "import"),
        ("```python\n1 +\n```\n", "import"),
        ("```python\nimport offdrift as od\nod.method('no such row')\n```\n", "run"),
    ],
)
def test_a_block_that_is_wrong_is_noticed(text, problem, tmp_path, monkeypatch):
    (block,) = blocks(text, "page.md")

    def check() -> None:
        if problem == "language":
            assert block.language in LANGUAGES
        elif problem == "command":
            (line,) = commands(block)
            test_a_command_can_be_read("page.md", line, monkeypatch)
        elif problem == "setting":
            test_toml_is_toml_and_a_recipe_has_these_settings(block)
        elif problem == "import":
            test_python_is_python_and_what_it_imports_of_ours_exists(block)
        else:
            test_python_runs(block, tmp_path, monkeypatch)

    with pytest.raises((AssertionError, ValueError, SyntaxError, ModuleNotFoundError, OffdriftError)):
        check()
