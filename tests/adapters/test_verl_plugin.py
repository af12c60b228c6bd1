"""verl loads the plugin by itself: in a process of its own, by entry point, by module, or not at all."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from offdrift.adapters.frameworks import WAITING, after_import
from tests.adapters.hooked import fake_site

ENTRY = "[verl.plugins]\noffdrift = offdrift.adapters.verl\n"


def installed(folder: Path) -> Path:
    """A folder that looks like an installed package with our entry point."""
    fake_site(folder, "offdrift_entry", "0.0.0", {"__init__.py": ""})
    (folder / "offdrift_entry-0.0.0.dist-info" / "entry_points.txt").write_text(ENTRY)
    return folder


def child(code: str, *folders: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that imports the real verl first."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OFFDRIFT_", "VERL_"))}
    path = os.pathsep.join([*map(str, folders), str(Path("src").resolve()), kept.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.slow
def test_verl_finds_the_entry_point_registers_and_installs(tmp_path):
    """One process: light at `import verl`, then losses, estimators and the driver's side."""
    found = child(
        """
        import sys
        import verl
        assert "offdrift.adapters.verl" in sys.modules
        heavy = ["verl.trainer.ppo.core_algos", "verl.trainer.ppo.ray_trainer", "pyarrow.parquet"]
        print("light", not any(m in sys.modules for m in heavy[:2]))
        from verl.trainer.ppo import core_algos
        print(sum(n.startswith("offdrift/") for n in core_algos.POLICY_LOSS_REGISTRY))
        print(core_algos.get_policy_loss_fn("offdrift/gspo").__name__)
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch as f
        print(f.__wrapped__.__module__, f.__closure__[0].cell_contents.describe())
        """,
        installed(tmp_path / "site"),
        OFFDRIFT_METHOD="icepop",
        OFFDRIFT_SETTINGS="weight.cap=4",
    )
    assert found.returncode == 0, found.stderr
    from offdrift.methods import METHODS

    assert found.stdout.splitlines() == [
        "light True",
        str(len(METHODS)),
        "offdrift_gspo",
        "verl.trainer.ppo.rollout_corr_helper "
        "[weight token ratio(mismatch), mask below 0.5, mask above 4]; records nothing",
    ]
    assert f"registered {len(METHODS)} policy losses" in found.stderr  # verl shows warnings alone
    assert "installed in verl's driver" in found.stderr


@pytest.mark.slow
def test_by_module():
    """Where entry points are not installed, VERL_USE_EXTERNAL_MODULES does it."""
    code = """
        import verl
        from verl.trainer.ppo import core_algos
        print(any(n.startswith("offdrift/") for n in core_algos.POLICY_LOSS_REGISTRY))
    """
    by_module = child(code, VERL_USE_EXTERNAL_MODULES="offdrift.adapters.verl", VERL_USE_EXTERNAL_PLUGINS="none")
    assert by_module.stdout.split() == ["True"], by_module.stderr


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that was not imported; it may import a module that calls back into it."""
    (tmp_path / "offdrift_late.py").write_text("import offdrift_inner\nvalue = 3\n")
    (tmp_path / "offdrift_inner.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "offdrift_late"
    for name in ("offdrift_late", "offdrift_inner"):
        sys.modules.pop(name, None)
        WAITING.queues.pop(name, None)


def test_runs_once_after_the_whole_module(module):
    seen = []

    def note(loaded):
        seen.append(loaded.value)

    after_import(module, note)
    after_import(module, note)
    assert seen == []
    loaded = importlib.import_module(module)
    assert seen == [3]
    assert type(loaded.__spec__.loader).__name__ == "SourceFileLoader"
    after_import(module, note)
    assert seen == [3, 3]


def test_what_is_asked_for_while_the_module_is_being_imported_waits_for_its_end(module):
    seen = []
    after_import(module, lambda m: seen.append(("outer", m.value)))
    after_import("offdrift_inner", lambda _: after_import(module, lambda m: seen.append(("inner", m.value))))
    importlib.import_module(module)
    assert seen == [("outer", 3), ("inner", 3)]


def test_a_module_that_is_not_there_is_still_not_there():
    after_import("offdrift_nowhere", print)
    with pytest.raises(ModuleNotFoundError, match="offdrift_nowhere"):
        importlib.import_module("offdrift_nowhere")
    WAITING.queues.pop("offdrift_nowhere")


def test_an_import_that_fails_may_be_tried_again(module, tmp_path):
    seen = []
    (tmp_path / "offdrift_inner.py").write_text("raise ImportError('not yet')\n")
    after_import(module, lambda m: seen.append(m.value))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(module)
    (tmp_path / "offdrift_inner.py").write_text("ready = 'at the second attempt'\n")
    importlib.invalidate_caches()
    importlib.import_module(module)
    assert seen == [3]
