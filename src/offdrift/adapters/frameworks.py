"""Which versions of which frameworks the adapters know, and how to say that one is missing."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from offdrift.errors import FrameworkError


@dataclass(frozen=True)
class Framework:
    """A framework that an adapter plugs into."""

    distribution: str
    """Name of the package to install."""
    module: str
    oldest: str
    """The oldest version that the adapter can work with."""
    tested: str
    """The newest version it was tested against: the real package where `ran`, else its published source."""
    install: str
    """What to type to get it."""
    ran: bool
    """Whether the adapter's tests run the real framework."""


FRAMEWORKS = {
    "verl": Framework("verl", "verl", "0.9.0", "0.9.1", "pip install 'offdrift[verl]'", True),
    "trl": Framework("trl", "trl", "1.16.0", "1.16.0", "pip install 'offdrift[trl]'", True),
    "prime-rl": Framework("prime-rl", "prime_rl", "0.8.0", "0.8.0", "see docs/integrations/prime-rl.md", False),
    "slime": Framework("slime", "slime", "0.3.1", "0.3.1", "see docs/integrations/slime.md", False),
    "miles": Framework("miles", "miles", "0.1.0", "0.1.0", "see docs/integrations/slime.md", False),
    "skyrl": Framework("skyrl", "skyrl", "0.3.0", "0.3.0", "see docs/integrations/skyrl.md", False),
    "nemo-rl": Framework("nemo-rl", "nemo_rl", "0.6.0", "0.7.0", "see docs/integrations/nemo-rl.md", False),
    "roll": Framework("roll", "roll", "0.3.0", "0.3.0", "see docs/integrations/roll.md", False),
    "areal": Framework("areal", "areal", "1.0.4", "1.0.4", "see docs/integrations/areal.md", False),
    "openrlhf": Framework("openrlhf", "openrlhf", "0.10.0", "0.11.2", "see docs/integrations/openrlhf.md", False),
}  # fmt: skip


@cache
def require(name: str) -> ModuleType:
    """The framework's module.

    A version newer than any that was tested is used, with one warning.

    Raises: `FrameworkError` naming what was found, what is tested and what to install, if it is
        missing, cannot be imported, or is too old.

    Example:
        >>> require("verl-of-tomorrow")
        Traceback (most recent call last):
        offdrift.errors.FrameworkError: no adapter for 'verl-of-tomorrow'; there are verl, trl, prime-rl, slime, miles, skyrl, nemo-rl, roll, areal, openrlhf
    """
    if name not in FRAMEWORKS:
        raise FrameworkError(f"no adapter for {name!r}; there are {', '.join(FRAMEWORKS)}")
    framework = FRAMEWORKS[name]
    known = f"tested: {framework.oldest} to {framework.tested}; {framework.install}"
    try:
        found = version(framework.distribution)
    except PackageNotFoundError as e:
        raise FrameworkError(f"{name} is not installed ({known})") from e
    if _release(found) < _release(framework.oldest):
        raise FrameworkError(f"{name} {found} is older than this adapter knows ({known})")
    if _release(found) > _release(framework.tested):
        logging.getLogger(f"offdrift.{name}").warning("%s %s is newer than tested (%s)", name, found, known)  # fmt: skip
    try:
        return import_module(framework.module)
    except ImportError as e:
        raise FrameworkError(f"{name} {found} cannot be imported: {e} ({known})") from e


def _release(text: str) -> tuple[int, ...]:
    """The release numbers of a version: "1.16.0rc1" is (1, 16, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    numbers = tuple(int(x) for x in found.group().split(".")) if found else ()
    return (*numbers, 0, 0, 0)[: max(3, len(numbers))]
