"""The frameworks' own modules: imported, or a skip that says why; a failure where they are required."""

import importlib
import importlib.util
import os
import re
import sys
import typing
import warnings
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import typing_extensions

from offdrift.adapters.frameworks import FRAMEWORKS
from tests.adapters.hooked import Batch, batch

ROOT = Path(__file__).parents[2]
VERSIONS = ROOT / "docs" / "integrations" / "versions.toml"
REQUIRED = "OFFDRIFT_FOREIGN"
"""Set to "required", a framework that is missing is a failure; set to "newest", another version is not."""

PINNED = dict(
    re.findall(
        r"^(openrlhf|areal|skyrl|ms-swift)==(\S+)$", (ROOT / "requirements-foreign.txt").read_text(), re.MULTILINE
    )
)


def missing(name: str, why: str) -> NoReturn:
    """Skip; fail where the pinned set is required."""
    said = f"{name} {PINNED[name]}: {why}; `make test-foreign` installs and runs it"
    if os.environ.get(REQUIRED) in ("required", "newest"):
        pytest.fail(said)
    pytest.skip(said)


def folder(name: str) -> Path:
    """Where the framework's package lies, without importing it."""
    spec = importlib.util.find_spec(FRAMEWORKS[name].module)
    if spec is None or not spec.submodule_search_locations:
        missing(name, "not importable")
    if version(name) != PINNED[name] and os.environ.get(REQUIRED) != "newest":
        missing(name, f"another version is installed, {version(name)}")
    return Path(next(iter(spec.submodule_search_locations)))


def module(framework: str, name: str) -> Any:
    """One of the framework's own modules, imported as it is."""
    folder(framework)
    return quietly(name)


def quietly(name: str) -> Any:
    """The module; what its import warns of is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def shell(monkeypatch: pytest.MonkeyPatch, name: str, path: Path | None = None) -> None:
    """A package whose submodules can be imported without running its own `__init__`; or an empty module."""
    made = ModuleType(name)
    if path is not None:
        made.__path__ = [str(path)]
    monkeypatch.setitem(sys.modules, name, made)


def typed_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.12 pydantic reads no fields of `typing.TypedDict`, which SkyRL's types are."""
    if sys.version_info < (3, 12):
        monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)


def doubles() -> Batch:
    """Float64, and nothing but numbers where it is masked: frameworks multiply by the mask."""
    one = batch(spread=0.6)
    return Batch(*(x.double() for x in (one.rollout, one.old, one.current, one.advantages)), one.mask)
