"""Old import paths work for one version, as the same modules, and say their new names."""

import subprocess
import sys
import warnings
from importlib import import_module
from importlib.metadata import version

import pytest

from offdrift import moved

OLD = {**moved.MODULES, "offdrift.lab.policy": "offdrift_lab.exact.policy", "offdrift.plan.simulate": "offdrift_lab.plan.simulate", "offdrift.schedules": "offdrift_lab.schedules", "offdrift.train.pipeline.driver": "offdrift_lab.train.pipeline.driver"}  # fmt: skip


@pytest.mark.parametrize("old", sorted(OLD))
def test_an_old_name_is_the_same_module_and_warns(old):
    for name in [m for m in sys.modules if m.startswith(("offdrift.train", "offdrift.lab", "offdrift.plan", "offdrift.schedules", old))]:  # fmt: skip
        del sys.modules[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = import_module(old)
    assert any(str(w.message).startswith(f"{old} is {OLD[old]} now") and w.category is FutureWarning for w in caught)
    assert module is import_module(OLD[old])
    assert module.__name__ == OLD[old]
    assert module.__spec__.name == OLD[old]


def test_statements_of_every_form_work():
    program = (
        "import offdrift.train.loop as a, offdrift_lab.train.loop.loop as b\n"
        "import offdrift_lab.train.loop as package\n"
        "from offdrift.train import recipe, sweep\n"
        "from offdrift.lab import TabularPolicy\n"
        "import offdrift.train.sweep\n"
        "assert a is b and package.loop is b and sweep.__name__ == 'offdrift_lab.train.sweep.sweep'\n"
        "assert offdrift.train.sweep is sweep\n"
        "try:\n    from offdrift.train import nothing\nexcept ImportError as e:\n    print(e)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert "'nothing'" in done.stdout


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_name_that_was_never_there_is_not_found():
    for name in ("offdrift.train.nothing", "offdrift.lab.nothing", "offdrift.nothing"):
        with pytest.raises(ModuleNotFoundError):
            import_module(name)


def test_the_old_names_end_with_the_next_but_one_version():
    now = tuple(int(x) for x in version("offdrift").split(".")[:2])
    assert now < tuple(int(x) for x in moved.REMOVED_IN.split(".")), "delete offdrift/moved.py"
