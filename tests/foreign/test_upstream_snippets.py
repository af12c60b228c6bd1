"""Snippets of the fixes against the settings that frameworks without a wheel read, from their sources.

prime-rl's with its own configuration classes, NeMo-RL's with its loss's class and the keys of its examples, slime's with
its own parser's flags. SkyRL's, TRL's and verl's are held against their wheels elsewhere.
"""

import ast
import importlib
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
import yaml

from offdrift.adapters.contrib import nemo_rl
from offdrift.judge import load_rules
from tests.foreign.test_upstream import empty, leave, packages, source

pytestmark = pytest.mark.foreign

FIXES = load_rules().fixes
MOVED = ("ipo", "icepop")
"""prime-rl's losses of September 2026, which its sources of August do not have."""


def of(framework: str) -> dict[str, str]:
    """Snippets of a framework by their fix."""
    found = {name: fix.snippets[framework] for name, fix in FIXES.items() if framework in fix.snippets}
    assert len(found) > 10
    return found


VLLM = {"logprobs_mode"}
"""vLLM's own arguments in these snippets, which prime-rl passes on (`VllmConfig`)."""


class Strict(pydantic.BaseModel):
    """As prime-rl's base class: another key is an error."""

    model_config = pydantic.ConfigDict(extra="forbid")


@pytest.fixture
def prime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its three configuration modules."""
    root = source("prime-rl") / "packages" / "prime-rl-configs" / "src"
    packages(monkeypatch, root, "prime_rl", "prime_rl.configs", "prime_rl.utils")
    empty(monkeypatch, "pydantic_config", BaseConfig=Strict, cli=None)
    environments = {name: type(name, (Strict,), {}) for name in ("EnvConfig", "SingleAgentEnvConfig", "ServeConfig")}
    empty(monkeypatch, "renderers", AutoRendererConfig=Strict, RendererConfig=Strict)
    empty(monkeypatch, "verifiers")
    empty(monkeypatch, "verifiers.v1", **environments)
    yield {
        name: importlib.import_module(f"prime_rl.configs.{name}") for name in ("trainer", "orchestrator", "inference")
    }
    leave("prime_rl")


def fits(model: type[pydantic.BaseModel], asked: dict[str, Any], path: str = "") -> None:
    """Every key is a field of the class, down to the values that its type takes."""
    for name, value in asked.items():
        if name in VLLM and model.model_config.get("extra") == "allow":
            continue  # passed on to vLLM as it is
        assert name in model.model_fields, f"{path}{name}"
        annotation = model.model_fields[name].annotation
        if isinstance(value, dict):
            default = model.model_fields[name].get_default(call_default_factory=True)
            inner = annotation if default is None else type(default)
            assert isinstance(inner, type)
            fits(inner, value, f"{path}{name}.")
        else:
            pydantic.TypeAdapter(annotation).validate_python(value)


def test_prime_rls_classes_take_its_snippets(prime: Any) -> None:
    models = {name: getattr(module, f"{name.title()}Config") for name, module in prime.items()}
    moved = 0
    for text in of("prime-rl").values():
        for section, asked in tomllib.loads(text).items():
            loss = asked.pop("loss", None)
            if loss is not None and loss["type"] == "custom":
                assert prime["trainer"].CustomLossConfig.model_validate(loss).kwargs["record"]
            elif loss is not None:
                assert loss["type"] in MOVED
                if hasattr(prime["trainer"], "IcePopLossConfig"):  # a newer source has them
                    pydantic.TypeAdapter(prime["trainer"].LossConfig).validate_python(loss)
                moved += 1
            fits(models[section], asked)
    assert moved == 4
    with pytest.raises(AssertionError, match=r"optim\.learning_rate"):
        fits(models["trainer"], {"optim": {"learning_rate": 1.0}})


def keys(tree: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of all values."""
    for name, value in tree.items() if isinstance(tree, dict) else ():
        yield from keys(value, f"{path}{name}.") if isinstance(value, dict) and value else [f"{path}{name}"]


def test_nemo_rls_keys_are_those_of_its_examples_and_of_its_loss() -> None:
    root = source("nemo-rl")
    folder = root / "examples" / "configs"
    known = {key for file in folder.glob("grpo*.yaml") for key in keys(yaml.safe_load(file.read_text()))}
    losses = {*nemo_rl.STOOD_IN_FOR, *nemo_rl.OWN_TERMS, *nemo_rl.FOLLOWED}  # its class's fields, by test_upstream.py
    known |= {f"loss_fn.{name}" for name in losses}
    for fix, text in of("nemo-rl").items():
        assert not set(keys(yaml.safe_load(text))) - known, fix


def flags(file: Path) -> set[str]:
    """First arguments of `add_argument` and of its wrappers."""
    calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call) and node.args)
    values = (call.args[i] for call in calls for i in range(min(2, len(call.args))))
    return {v.value for v in values if isinstance(v, ast.Constant) and str(v.value).startswith("--")}


MEGATRON = {"--lr", "--fp16", "--clip-grad", "--save-interval"}
"""Of Megatron's own parser, which slime extends."""
SGLANG = {"--sglang-dtype", "--sglang-enable-deterministic-inference"}
"""Of SGLang's server, each behind `--sglang-`."""


def test_slimes_flags_are_its_parsers() -> None:
    known = flags(source("slime") / "slime" / "utils" / "arguments.py")
    assert len(known) > 100
    asked = {w for text in of("slime").values() for w in shlex.split(text, comments=True) if w.startswith("--")}
    assert asked - known <= MEGATRON | SGLANG
    assert len(asked & known) > 12
