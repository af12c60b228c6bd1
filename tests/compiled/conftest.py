"""A cache of libraries of one's own, and compiled passes that are asked for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from offdrift.compiled import build, compiled_passes


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A process that has loaded nothing yet, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    for name in ("TORCH_COMPILE_DISABLE", "OFFDRIFT_COMPILE", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build, "_loaded", [])


@pytest.fixture
def compiled(fresh: None) -> Iterator[None]:
    with compiled_passes():
        assert build.library() is not None
        yield
