"""The pinned set is there where it is required, and the adapters know its versions."""

import pytest

from offdrift.adapters.frameworks import FRAMEWORKS
from tests.foreign.real import PINNED, folder

pytestmark = pytest.mark.foreign


@pytest.mark.parametrize("name", PINNED)
def test_the_pinned_framework_is_installed(name: str) -> None:
    assert (folder(name) / "__init__.py").is_file()


def test_the_newest_tested_version_is_the_pinned_one() -> None:
    assert set(PINNED) == {"openrlhf", "areal", "skyrl", "ms-swift"}
    # AReaL 2.0.0 is a tag without a wheel; the newest wheel is pinned.
    assert {name: FRAMEWORKS[name].tested for name in PINNED} == PINNED | {"areal": "2.0.0"}
