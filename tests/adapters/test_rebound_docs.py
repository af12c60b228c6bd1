"""Configurations and commands in the pages of NeMo-RL, ROLL, AReaL and OpenRLHF do what they say."""

import importlib
import json
import re
import runpy
import shlex
import sys
from typing import Any

import pytest
import yaml

from offdrift.adapters.contrib import areal, nemo_rl, openrlhf, roll
from offdrift.adapters.frameworks import FRAMEWORKS, WAITING
from offdrift.adapters.hooks import HookConfig
from offdrift.errors import EvidenceError, FrameworkError
from tests.adapters.hooked import ROOT, code, install
from tests.adapters.test_nemo_rl import ClippedPGLossConfig

PAGES = ROOT / "docs" / "integrations"
ENDING = ["What you see", "Does the server hold the newest weights?", "Supported", "Not supported"]


@pytest.fixture(autouse=True)
def nothing_installed(process: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch, "99", {"nemo_rl": {}, "roll": {}, "areal": {}, "openrlhf": {}})
    yield
    areal.uninstall()
    openrlhf.uninstall()
    for name in (areal.ACTOR, areal.FUNCTIONAL, openrlhf.ACTOR):
        WAITING.queues.pop(name, None)


def in_environment(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in given.items():
        assert name.startswith("OFFDRIFT_")
        monkeypatch.setenv(name, value)


def test_nemo_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(runpy, "run_path", lambda path, run_name: ran.append(path))
    install(monkeypatch, "0.6.0", {"nemo_rl.algorithms.grpo": {"ClippedPGLossFn": object}})
    grpo = importlib.import_module("nemo_rl.algorithms.grpo")
    whole, exact = code("nemo-rl.md", "python")
    for block, method in ((whole, "dppo_tv"), (exact, "trm_max")):
        exec(block, {})
        assert grpo.ClippedPGLossFn(ClippedPGLossConfig()).config.method == method
        nemo_rl.uninstall()
    assert ran == ["examples/run_grpo.py"]
    (command,) = code("nemo-rl.md", "shell")
    assert "train.py" in shlex.split(command)


def test_roll_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [yaml.safe_load(block) for block in code("roll.md", "yaml")]
    assert len(blocks) == 2
    for block, name in zip(blocks, ("Worker", "CorrectingWorker"), strict=True):
        in_environment(monkeypatch, block["system_envs"])
        assert block["actor_train"]["worker_cls"] == f"offdrift.adapters.contrib.roll.{name}"
        assert name in roll.WORKERS
        monkeypatch.delenv("OFFDRIFT_RECORD", raising=False)
        roll._hook.cache_clear()
        correction = roll._hook(whole=name == "Worker").method.correction
        assert correction.gates or correction.weights
        roll._hook.cache_clear()
        monkeypatch.delenv("OFFDRIFT_SETTINGS", raising=False)
        assert block["actor_infer"]["generating_args"]["logprobs"] == 1
        correcting = name == "CorrectingWorker"
        assert block["train_infer_correction"]["is_weight"]["enabled"] is correcting
    named = set(re.findall(r"^\| `(\w+)` \|", (PAGES / "roll.md").read_text(), re.MULTILINE))
    assert named == set(roll.WORKERS)


def test_areal_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (yaml.safe_load(b)["actor"] for b in code("areal.md", "yaml"))
    (spec,) = block["scheduling_spec"]
    assert shlex.split(spec["cmd"]) == ["python", "-m", "offdrift.adapters.contrib.areal"]
    in_environment(monkeypatch, spec["env_vars"])
    areal.install()
    assert areal._INSTALLED[0][0].method == "icepop"
    assert block["use_decoupled_loss"]
    assert block["rejection_sampling"] is None


@pytest.mark.parametrize(("page", "module"), [("areal.md", areal), ("openrlhf.md", openrlhf)])
def test_python_blocks_run(page: str, module: Any) -> None:
    (block,) = code(page, "python")
    exec(block, {})
    assert not module._INSTALLED


def test_openrlhf_command(monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = code("openrlhf.md", "shell")
    words = shlex.split(command)
    environment = json.loads(words[words.index("--runtime-env-json") + 1])
    module, _, name = environment["worker_process_setup_hook"].rpartition(".")
    in_environment(monkeypatch, environment["env_vars"])
    getattr(importlib.import_module(module), name)()
    assert openrlhf._INSTALLED[0].method == "icepop"
    assert words[words.index("--") + 1 :][:3] == ["python", "-m", "openrlhf.cli.train_ppo_ray"]


@pytest.mark.parametrize("method", ["trm_max", "deepseek_v32"])
def test_what_the_openrlhf_page_calls_unsupported(method: str) -> None:
    assert HookConfig.of("openrlhf", method)
    with pytest.raises(EvidenceError):
        openrlhf.install(method)


def test_the_overview_links_every_page_and_only_those() -> None:
    text = (PAGES / "README.md").read_text()
    linked = set(re.findall(r"^\| \[[^]]+\]\(([\w-]+\.md)\)", text, re.MULTILINE))
    assert linked == {p.name for p in PAGES.glob("*.md")} - {"README.md"}
    assert len(linked) == 14


def resolve(path: str) -> Any:
    """The module or attribute of a dotted path; a class that needs a missing framework is one."""
    names = path.split(".")
    for i in range(len(names), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(names[:i]))
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("offdrift"):
                raise
            continue
        try:
            for name in names[i:]:
                value = getattr(value, name)
        except FrameworkError:
            return None
        return value
    raise AssertionError(f"{path} is nothing")


@pytest.mark.parametrize("page", sorted(p.name for p in PAGES.glob("*.md")))
def test_every_dotted_path_of_a_page_resolves(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)  # which takes long to import
    text = (PAGES / page).read_text()
    loggers = {f"offdrift.{name}" for name in FRAMEWORKS}
    for path in set(re.findall(r"(?<![\w.])offdrift(?:\.[A-Za-z_][\w-]*)+", text)) - loggers:
        resolve(path)
    for module, names in re.findall(r"from (offdrift[\w.]*) import ([\w, ]+)", text):
        for name in names.split(", "):
            resolve(f"{module}.{name}")


@pytest.mark.parametrize("page", ["prime-rl", "slime", "skyrl", "nemo-rl", "roll", "areal", "openrlhf"])
def test_pages_of_hooks_are_built_alike(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text()
    facts = ["Version", "Tests here", "Run against the real package", "Not run"]
    before, *_ = text.partition("\n## ")
    assert re.findall(r"^\| ([A-Z][\w ]+) \|", before, re.MULTILINE) == facts
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert sections[-4:] == ENDING
    stated = re.findall(r"`(tests/[\w/.]+)`", before)
    assert stated
    assert all((ROOT / path).is_file() for path in stated)
    assert text.index("```") < text.index("## What you see")


def test_the_overviews_versions_are_those_of_the_pages() -> None:
    rows = re.findall(
        r"^\| \[[^]]+\]\(([\w-]+)\.md\) \|.*\| (\d+\.\d+[\d.]*) \|[^|]*\|$",
        (PAGES / "README.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 12
    for page, version in rows:
        assert version in (PAGES / f"{page}.md").read_text(), page
