"""Old import paths of modules that are elsewhere now, mostly `offdrift_lab`: they work for one version, with a warning.

`offdrift.train.loop` is `offdrift_lab.train.loop.loop`: the same module object under both names, so that classes
compare equal and settings made by one name are seen by the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType

REMOVED_IN = "0.4"
"""Version in which the old names end."""

ROOMS = {
    "train.settings": "recipe parts:sections rollout_parts:rollout optim places",
    "train.loop": "loop arm context step batch record old_policy run_folder sharded",
    "train.data": (
        "source buffer draws:group_filter tasks problems environments episodes rewards judge:llm_judge math_answers "
        "warmstart"
    ),
    "train.report": "stored page view overlap",
    "train.sweep": "sweep sweep_results sweep_workers",
    "train.features": "align critic drafter fusion lora:lora_adapters perturb quantized:quantization",
}
"""New room of each module of the old `train`; `old:new` where the name changed too."""
TRAIN = {
    old: f"offdrift_lab.{room}.{new or old}"
    for room, names in ROOMS.items()
    for old, _, new in (name.partition(":") for name in names.split())
}
PACKAGES = {
    "offdrift.train.pipeline": "offdrift_lab.train.pipeline",
    "offdrift.schedules": "offdrift_lab.schedules",
    "offdrift.plan": "offdrift_lab.plan",
    "offdrift.lab": "offdrift_lab.exact",
}
MODULES = {
    "offdrift.train.models": "offdrift.models",
    "offdrift.stats.paired": "offdrift.stats.seeds",
    "offdrift.prove.lengths": "offdrift_lab.exact.lengths",
    **{f"offdrift.judge.{name}": f"offdrift_lab.evidence.{name}" for name in ("predictor", "collapse", "budget")},
    **{f"offdrift.train.{old}": new for old, new in TRAIN.items()},
}


def new_name(name: str) -> str | None:
    """Return the new name of a module that moved, None of any other.

    Example:
        >>> new_name("offdrift.train.recipe"), new_name("offdrift.lab.policy"), new_name("offdrift.loss")
        ('offdrift_lab.train.settings.recipe', 'offdrift_lab.exact.policy', None)
    """
    if name in MODULES:
        return MODULES[name]
    for old, new in PACKAGES.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None


class OldNames:
    """Finds a module by its old name; it stands first, since the new packages have modules of the old names."""

    def find_spec(self, name: str, path: Iterable[str] | None = None, target: ModuleType | None = None) -> object:
        """Return how to load a module that moved, and warn; None for any other, which other finders look for."""
        if name == "offdrift.train":
            return ModuleSpec(name, _Folder(), is_package=True)  # type: ignore[arg-type]
        new = new_name(name) if name.startswith("offdrift.") else None
        if new is None or importlib.util.find_spec(new) is None:
            return None
        warnings.warn(f"{name} is {new} now; the old name ends with {REMOVED_IN}", FutureWarning, stacklevel=2)
        return ModuleSpec(name, _Alias(new), is_package=False)  # type: ignore[arg-type]


class _Alias:
    """Loads nothing: the module that the new name has."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.new)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importing by the old name had replaced it


class _Folder:
    """The old `offdrift.train`: a package with nothing in it but its modules.

    The new package has other modules of some of the old names, so one object cannot be both.
    """

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: self.module(name)  # type: ignore[attr-defined]

    def module(self, name: str) -> ModuleType:
        if f"offdrift.train.{name}" in MODULES:
            return importlib.import_module(f"offdrift.train.{name}")
        raise AttributeError(f"module 'offdrift.train' has no attribute {name!r}")


def install() -> None:
    """Let old names be found."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())  # type: ignore[arg-type]
