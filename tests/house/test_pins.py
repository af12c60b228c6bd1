"""One version of every package: what the requirements files pin is what the constraints file says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pins(path: Path) -> dict[str, str]:
    """Version by name, of the lines that pin one."""
    lines = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}


@pytest.mark.parametrize("path", sorted(ROOT.glob("requirements-*.txt")), ids=lambda p: p.name)
def test_pins_agree_with_the_constraints(path):
    constraints, pinned = pins(ROOT / "constraints.txt"), pins(path)
    assert len(constraints) > 100
    assert pinned
    assert {name: version for name, version in pinned.items() if constraints.get(name, version) != version} == {}
