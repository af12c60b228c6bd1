"""Libraries are built once for all tests here, into a folder of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

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
    monkeypatch.setattr(build, "_loaded", {})


@pytest.fixture
def compiled(fresh: None) -> Iterator[None]:
    with compiled_passes():
        yield


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
