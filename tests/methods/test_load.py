"""Methods in a user's code, by "file.py:name" and "package.module:name": what loads, what is refused, what never runs."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import offdrift as od
from offdrift.errors import MethodError
from offdrift.judge import Context
from offdrift.judge.readings.levels import weights_of
from offdrift.judge.readings.view import View, Window
from offdrift.logprobs import LogProbs
from offdrift.methods.describe import settings
from offdrift.methods.load import UNLOADED, absolute, code_source, load_method, loaded, without_loading
from offdrift.segments import Segments

GOOD = """
import offdrift as od

plain = od.method("gspo")

def mine():
    return od.Method(objective=od.Reinforce(), correction=od.Correction() & od.Weight(on="full", cap=2.0))

def tunable(cap: float = 2.0, *, on: str = "full"):
    return od.Method(objective=od.Reinforce(), correction=od.Correction() & od.Weight(on=on, cap=cap))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, text: str = GOOD, name: str = "mine.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["mine.py:plain", "mine.py:mine", "mine.py:tunable"])
def test_a_method_and_functions_that_make_one_are_methods(folder, name):
    path = written(folder)
    row = od.method(name)
    assert isinstance(row, od.Method)
    assert row is od.method(f"{path}:{name.split(':')[1]}") is loaded(name)
    assert row == (od.method("gspo") if name.endswith("plain") else od.method("mine.py:mine"))


def test_a_loss_takes_the_name(folder):
    written(folder)
    lp = LogProbs.pack(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.9]), segments=Segments.from_lengths([2]))
    got = od.policy_loss(lp, "mine.py:mine", torch.ones(2)).loss
    assert got == od.policy_loss(lp, od.method("mine.py:mine"), torch.ones(2)).loss
    assert got == pytest.approx(1.5 * 2.718281828**-0.5 + 1.9 * 2.718281828**0.1)


def test_a_package_is_found_in_the_working_folder(folder):
    written(folder, "", "pack_of_rows/__init__.py")
    path = written(folder, GOOD, "pack_of_rows/rows.py")
    assert od.method("pack_of_rows.rows:plain") == od.method("gspo")
    assert code_source("pack_of_rows.rows:plain").file == str(path)


def test_arguments_of_the_function_are_settings(folder):
    written(folder)
    row = od.method("mine.py:tunable")
    changed = od.override(row, {"cap": 3, "weight.floor": 0.5})
    weight = changed.correction.weights[0]
    assert (weight.cap, weight.floor) == (3.0, 0.5)
    assert od.override(changed, {"weight.cap": 4.0}).correction.weights[0].cap == 4.0
    assert {k: v for k, v in settings(changed).items() if "." not in k}.items() >= {"cap": 3.0, "on": "full"}.items()
    with pytest.raises(MethodError, match=r"tunable cap = 'x': must be a number"):
        od.override(row, {"cap": "x"})
    with pytest.raises(MethodError, match="paths are cap, on, aggregate"):
        od.override(row, {"kap": 1})
    with pytest.raises(MethodError, match=r"cap: settings of .*tunable come before other changes"):
        od.override(changed, {"cap": 1.0})


def test_the_source_has_file_attribute_and_hash_of_what_ran(folder):
    path = written(folder)
    source = code_source("mine.py:mine")
    assert source.as_dict() == {
        "file": str(path),
        "attribute": "mine",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    before = path.read_bytes()
    path.write_text("raise RuntimeError('changed')")  # a run goes on with the code that it began with
    assert code_source("mine.py:plain").sha256 == hashlib.sha256(before).hexdigest()


def test_what_is_cached_of_an_earlier_file_is_not_run(folder):
    """Same size, same second: Python's cache of compiled files cannot tell them apart."""
    path = written(folder, "import offdrift as od\nmine = od.method('dapo')\n", "a/mine.py")
    environment = {k: x for k, x in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")}
    subprocess.run(
        [sys.executable, "-c", "import py_compile; py_compile.compile('mine.py')"],
        cwd=path.parent,
        check=True,
        env=environment,
    )
    stamp = path.stat()
    path.write_text("import offdrift as od\nmine = od.method('none')\n")
    assert path.stat().st_size == stamp.st_size
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert (path.parent / "__pycache__").is_dir()
    assert od.method("a/mine.py:mine") == od.method("none")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "absent.py:mine", r"absent\.py:mine: there is no file .*absent\.py"),
        (GOOD, "mine.py:absent", r"mine\.py has no 'absent'; its methods are plain, mine, tunable"),
        ("def fall(log_ratio): pass\ndef mine(): pass", "mine.py:x", r"mine\.py has no 'x'; its methods are mine$"),
        (None, "mine.py", r"no method 'mine\.py'; a method in a file is named with the file: mine\.py:NAME"),
        ("x = 3", "mine.py:x", r"mine\.py:x is a int, 3; expected an offdrift\.Method, a function"),
        ("def f(a, b=1): pass", "mine.py:f", r"mine\.py:f needs a; expected an offdrift\.Method"),
        ("def f(): return 'gspo'", "mine.py:f", r"mine\.py:f returned a str, 'gspo'; expected an offdrift\.Method"),
        ("def f():\n    return 1 / 0", "mine.py:f", r"mine\.py:f: .*mine\.py, line 2: ZeroDivisionError: division by"),
        ("import nothing_of_that_name", "mine.py:f", r"mine\.py, line 1: ModuleNotFoundError: No module named"),
        ("x = (", "mine.py:x", r"mine\.py:x: .*mine\.py, line 1: SyntaxError: '\(' was never closed"),
        ("raise SystemExit(3)", "mine.py:x", r"mine\.py, line 1: SystemExit: 3"),
        (None, "no_such_package.rows:x", r"there is no module 'no_such_package' in .* or installed"),
        (None, "mine.py:", r"'mine\.py:' is no method; code is named as"),
        (None, ":x", r"':x' is no method"),
        (None, "mine.py:a b", r"'mine\.py:a b' is no method"),
        (None, "a\0b.py:x", r"embedded null"),
        (
            "import offdrift as od\ndef f():\n    return od.Method(objective=od.Clipped(),\n"
            "        correction=od.Correction() & od.Weight(on='full', cap=2.0))",
            "mine.py:f",
            r"mine\.py, line 3: MethodError: the objective already contains the staleness ratio",
        ),
    ],
)
def test_what_is_wrong_is_said_with_file_attribute_and_what_was_expected(folder, text, name, message):
    if text is not None:
        written(folder, text)
    with pytest.raises(MethodError, match=message):
        od.method(name)


def test_a_file_that_failed_can_be_mended_and_loaded(folder):
    path = written(folder, "x = (")
    with pytest.raises(MethodError):
        od.method("mine.py:mine")
    path.write_text(GOOD)
    assert od.method("mine.py:mine").objective == od.Reinforce()


def test_names_become_absolute_in_the_folders_that_are_given(folder):
    there, here = written(folder / "there"), written(folder)
    assert absolute("mine.py:mine", there.parent, folder) == f"{there}:mine"
    assert absolute("mine.py:mine") == f"{here}:mine"
    assert absolute("gspo") == "gspo"
    assert absolute("pack.rows:mine") == "pack.rows:mine"


LEAVES_A_TRACE = "open('ran', 'w').close()\n" + GOOD


def test_nothing_runs_where_names_come_from_records(folder):
    path = written(folder, LEAVES_A_TRACE)
    with without_loading():
        assert od.method("mine.py:mine") is UNLOADED
        assert load_method(f"{path}:mine") is UNLOADED
    assert loaded("mine.py:mine") is None
    assert not (folder / "ran").exists()
    od.method("mine.py:mine")
    assert (folder / "ran").exists()
    with without_loading():
        assert od.method("mine.py:mine") is loaded("mine.py:mine") is not None


def view(method: str) -> View:
    return View(Window(1), Context(method=method), {})


def test_a_diagnosis_does_not_run_the_method_that_a_log_names(folder):
    path = written(folder, LEAVES_A_TRACE)
    assert weights_of(view(f"{path}:mine")) is None
    assert not (folder / "ran").exists()
    od.method("mine.py:mine")
    assert [w.cap for w in weights_of(view(f"{path}:mine")) or []] == [2.0]
