"""What three users wanted, each as a script, from a wheel in an environment of its own outside the checkout.

`make dist-test` runs the same scripts where pip has installed every dependency anew. Here the environment holds the
wheel alone and finds its dependencies in this one, through a path file: a fresh torch costs minutes.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("broken_run.py", "new_method.py", "gate_and_alarm.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with the wheel that this tree builds."""
    folder = tmp_path_factory.mktemp("users")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    home = folder / "venv"
    venv.create(home, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--disable-pip-version-check", str(wheel)], check=True)
    (own,) = home.glob("lib/python*/site-packages")
    # A folder that a path file names is not searched for path files: the checkout's own, which is among them, is not seen.
    (own / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return home / "bin/python"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_user_gets_what_it_wanted(python: Path, tmp_path: Path, script: str) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    clean |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name(script))], cwd=tmp_path, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_a_checkout_is_refused(tmp_path: Path) -> None:
    """The scripts try the wheel: beside an interpreter that imports the tree they say so."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    script = Path(__file__).with_name("broken_run.py")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "outside the environment" in done.stderr
