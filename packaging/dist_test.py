"""Build wheel and sdist, install them as users do, and use them: `make dist-test`.

    python packaging/dist_test.py [--extras core,audit,train] [--torch torch==2.13.0] [--keep FOLDER] [--no-isolation]

Every extra gets a fresh environment that has torch and nothing else, then the wheel with that extra, and a script that
uses what the extra promises; with [train] also the scripts of `tests/users`. The core must not bring what belongs to an extra. Continuous integration can run the
extras in parts. Packages come from where pip is set up to look; `build` must be installed here (`offdrift[dev]`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = """
import subprocess, sys
import offdrift as od, torch
from importlib.metadata import version
from importlib.resources import files

lp = od.LogProbs.pack(torch.full((2, 3), -1.0), torch.full((2, 3), -1.1, requires_grad=True), mask=torch.ones(2, 3))
for name in od.METHODS:
    od.method(name)
result = od.policy_loss(lp, od.method("token_tis"), lp.segments.spread(torch.tensor([1.0, -1.0])))
result.loss.backward()
assert od.summarize(result.stats)
assert od.unified and files("offdrift").joinpath("py.typed").is_file()
foreign = {"transformers", "pyarrow", "typer", "pydantic", "jinja2", "plotly", "ray"} & {*sys.modules}
assert not foreign, foreign
try:
    od.record
except ModuleNotFoundError as e:
    assert "offdrift[audit]" in str(e), e
else:
    raise AssertionError("pyarrow is there, which the core does not ask for")
for words in (["--help"], ["train", "tiny"]):
    done = subprocess.run([sys.executable, "-m", "offdrift", *words], capture_output=True, text=True)
    assert done.returncode == 1 and "offdrift[train]" in done.stderr and "Traceback" not in done.stderr, done
print("core", version("offdrift"), "torch", version("torch"), "python", sys.version.split()[0])
"""
AUDIT = """
import json, subprocess, sys, torch
from importlib.metadata import version
import offdrift as od

g = torch.Generator().manual_seed(0)
for step in range(4):
    logp = -1 - 2 * torch.rand(64, 8, generator=g)
    log = od.record("log", step=step, logp_rollout=logp + 0.1 * torch.randn(64, 8, generator=g), logp=logp,
                    mask=torch.ones(64, 8), rewards=torch.rand(64, generator=g))
log.close()
run = lambda *words: subprocess.run([sys.executable, "-m", "offdrift", *words], check=True, capture_output=True, text=True)
audit = json.loads(run("audit", "log", "--out", "out", "--json").stdout)
assert audit["counts"]["tokens"] == 4 * 64 * 8, audit["counts"]
assert (open("out/report.html").read().count("<script") > 1)
run("report", "out"), run("methods", "gspo"), run("bound", "--help"), run("plan", "--help")
assert run("docs", "docs/rules.md").stdout.startswith("# Rules")
assert run("--version").stdout.split() == ["offdrift", version("offdrift")]
for words, extra in ((["train", "tiny"], "train"), (["plan"], "plan")):
    done = subprocess.run([sys.executable, "-m", "offdrift", *words], capture_output=True, text=True)
    assert done.returncode == 1 and f"offdrift[{extra}]" in done.stderr and "Traceback" not in done.stderr, done
print("audit", audit["verdict"]["level"], len(audit["findings"]), "findings")
"""
TRAIN = """
import json, subprocess, sys
open("reward.py", "w").write("def digits(completion):\\n    return sum(c.isdigit() for c in completion) / max(1, len(completion))\\n")
open("run.toml", "w").write('''
name = "built"
model = "tiny-qwen3"
reward = "reward.py:digits"
batches = 2
warm_start = { steps = 0 }
rollout = { prompts = 2, samples = 2, max_tokens = 4 }
lag = { sync_every = 1 }
log = { eval_every = 2, eval_prompts = 2 }
[arms.none]
method = "none"
''')
open("sweep.toml", "w").write('name = "s"\\nrecipe = "run"\\nseeds = 2\\n[compare]\\nmetric = "reward/mean"\\n')
run = lambda *words: subprocess.run([sys.executable, "-m", "offdrift", *words], check=True, capture_output=True, text=True)
table = json.loads(run("train", "run.toml", "--out", "out", "--json").stdout)["table"]
assert [row["updates"] for row in table] == [2], table
run("report", "out"), run("audit", "out/arms/none", "--out", "audit"), run("sweep", "sweep.toml"), run("report", "runs/s")
run("plan", "--help"), run("check", "--help"), run("sweep", "sweep", "--dry-run")
own = ["train", "recipes/tiny.toml", "--arms", "none", "--set", "warm_start.steps=0", "--set", "batches=1"]
run(*own, "--set", "rollout.prompts=2", "--set", "rollout.samples=2", "--set", "lag.sync_every=1", "--out", "own")
assert json.load(open("own/run.json"))["name"] == "tiny"
print("train", table[0]["arm"], "2 updates, audited and swept")
"""
SCRIPTS = {"core": CORE, "audit": AUDIT, "train": TRAIN}
USERS = ("broken_run", "new_method", "gate_and_alarm")
"""Scripts of `tests/users`, which need [train]."""


def build(out: Path, *options: str) -> Path:
    """Wheel and sdist; the sdist builds the same wheel. Returns the wheel."""
    command = [sys.executable, "-m", "build", *options, "--outdir"]
    subprocess.run([*command, str(out), "--sdist", str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "unpacked", filter="data")
    (source,) = (out / "unpacked").iterdir()
    # From the sdist, as an installer without a wheel does, and from here.
    subprocess.run([*command, str(out), "--wheel", str(source)], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*command, str(out / "here"), "--wheel", str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    (wheel,), (other,) = out.glob("*.whl"), (out / "here").glob("*.whl")
    names, others = ({i.filename for i in zipfile.ZipFile(w).infolist()} for w in (wheel, other))
    assert names == others, f"sdist and tree build other wheels: {sorted(names ^ others)[:5]}"
    files = {
        *(
            str(p.relative_to(ROOT / "src"))
            for p in (ROOT / "src").rglob("*")
            if p.is_file() and "__pycache__" not in p.parts
        ),
        *(f"offdrift_lab/recipes/{p.name}" for p in (ROOT / "recipes").iterdir() if p.is_file()),
    }
    missing = {name for name in files if "__pycache__" not in name} - names
    assert not missing, f"the wheel lacks {sorted(missing)[:5]}"
    assert "offdrift/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    strangers = {name.split("/")[0] for name in names} - {
        "offdrift",
        "offdrift_lab",
        f"{wheel.name.split('-py3')[0]}.dist-info",
    }
    assert not strangers, f"the wheel installs more than offdrift: {strangers}"
    size = lambda file: f"{file.name} {file.stat().st_size / 1e6:.1f} MB"  # noqa: E731
    print(f"built {size(sdist)}, {size(wheel)}: {len(names)} files, the same from both", flush=True)
    return wheel


def use(extra: str, wheel: Path, torch: str, folder: Path) -> None:
    """Install the wheel with one extra into a fresh environment, and run what it promises."""
    begin = time.monotonic()
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, torch], check=True)  # first and alone: asked for by a range, it may be another build
    subprocess.run([*pip, f"{wheel}[{extra}]" if extra != "core" else str(wheel)], check=True)
    subprocess.run([str(python), "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)
    work = folder / "work"
    work.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment = clean | {"OMP_NUM_THREADS": "1"}
    subprocess.run([str(python), "-c", SCRIPTS[extra]], check=True, cwd=work, env=environment)
    for name in USERS if extra == "train" else ():
        own = folder / name
        own.mkdir()
        subprocess.run([str(python), str(ROOT / f"tests/users/{name}.py")], check=True, cwd=own, env=environment)
    print(f"{extra}: installed and used in {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default=",".join(SCRIPTS), help=f"of {', '.join(SCRIPTS)}; empty: build only")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is asked for first")
    parser.add_argument("--keep", type=Path, help="folder for wheel and sdist")
    parser.add_argument(
        "--no-isolation", action="store_true", help="build with the hatchling that is installed here, fetching nothing"
    )
    options = parser.parse_args()
    extras = [extra for extra in options.extras.split(",") if extra]
    if unknown := {*extras} - {*SCRIPTS}:
        parser.error(f"no extra {', '.join(sorted(unknown))}; there are {', '.join(SCRIPTS)}")
    with tempfile.TemporaryDirectory(prefix="dist-") as temporary:
        folder = Path(temporary)
        wheel = build(folder / "dist", *["--no-isolation"] * options.no_isolation)
        for extra in extras:
            use(extra, wheel, options.torch, folder / extra)
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            for file in (*folder.glob("dist/*.whl"), *folder.glob("dist/*.tar.gz")):
                (options.keep / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    main()
