"""Imports point one way, and each heavy package is imported where it belongs and nowhere else."""

import ast
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

# A room may import rooms of a lower level, and its own. Moving a file means editing this on purpose.
LEVELS = {
    "offdrift": [
        {"errors"},
        {"numerics", "texts", "hosts", "step_policy", "model_names"},
        {"notebook", "compiled"},
        {"segments", "setting"},
        {"logprobs"},
        {"ratios", "divergence"},
        {"batch_info"},
        {"correction"},
        {"objectives", "advantages", "aggregate", "penalty", "stats"},
        {"methods"},
        {"loss"},
        {"certificate", "judge", "laws"},
        {"records"},
        {"engines", "models", "show"},
        {"adapters", "alarms"},
        # The products: each holds its logic and its views, and none imports another.
        {"check", "audit", "prove"},
        {"cli"},
        {"__main__", "moved"},
    ],
    # The laboratory builds on all of the above but its products.
    "offdrift_lab": [{"schedules"}, {"evidence"}, {"plan", "train", "exact"}, {"cli"}],
}
LEVEL = {
    f"{package}.{room}": i for package, levels in LEVELS.items() for i, rooms in enumerate(levels) for room in rooms
}
CORE = {f"offdrift.{room}" for rooms in LEVELS["offdrift"][:12] for room in rooms} | {
    "offdrift.__init__",
    "offdrift.moved",
}
CORE |= {"offdrift_lab.exact", "offdrift_lab.schedules"}
DOOR = "offdrift/cli/__init__.py"
"""The table of commands, which names modules of the laboratory."""

# third party -> the only places that may import it
ALLOWED = {
    "vllm": {"offdrift/engines/vllm/engine.py"},
    "transformers": {
        "offdrift/adapters/hf_trainer.py",
        "offdrift/engines/hf",
        "offdrift/models.py",
        "offdrift_lab/train/",
    },
    "accelerate": {"offdrift_lab/train/"},
    "pyarrow": {"offdrift/records/"},
    "fsspec": {"offdrift/records/readers/files.py"},
    "orjson": {"offdrift/records/readers/"},
    "ray": {
        "offdrift/engines/cluster.py",
        "offdrift/engines/isolation.py",
        "offdrift/audit/stream.py",
        "offdrift_lab/train/pipeline/",
        "offdrift_lab/train/sweep/sweep_workers.py",
    },
    "simpy": {"offdrift_lab/plan/"},
    "pydantic": {
        "offdrift_lab/train/features/fusion.py",
        "offdrift_lab/train/settings/optim.py",
        "offdrift_lab/train/settings/sections.py",
        "offdrift_lab/train/features/quantization.py",
        "offdrift_lab/train/settings/arm_tables.py",
        "offdrift_lab/train/settings/recipe.py",
        "offdrift_lab/train/settings/rollout.py",
        "offdrift_lab/train/sweep/sweep.py",
        "offdrift_lab/plan/phases.py",
        "offdrift/records/provenance.py",
    },
    "typer": {"offdrift/cli/", "offdrift_lab/cli/"},
    "rich": {
        "offdrift/cli/",
        "offdrift_lab/cli/",
        "offdrift_lab/exact/lengths.py",
        "offdrift/show/",
        "offdrift_lab/exact/views.py",
        "offdrift_lab/exact/run_views.py",
        "offdrift/check/view.py",
        "offdrift/audit/view.py",
        "offdrift/audit/arms_view.py",
        "offdrift/audit/compare.py",
        "offdrift/audit/watch_view.py",
        "offdrift/prove/",
        "offdrift_lab/plan/view.py",
        "offdrift_lab/train/report/view.py",
    },
    "triton": {"offdrift/divergence/kernels_"},
    "safetensors": {
        "offdrift/models.py",
        "offdrift/records/store.py",
        "offdrift/engines/grids.py",
        "offdrift/engines/server/engine.py",
        "offdrift_lab/train/",
    },
    "httpx": {"offdrift/engines/server/client.py"},
    "httpcore": {"offdrift/engines/server/client.py"},
    "matplotlib": {"offdrift/show/png.py"},
    "jinja2": {"offdrift/show/html.py"},
    "reasoning_gym": {"offdrift_lab/train/data/tasks.py", "offdrift_lab/train/data/rewards.py"},
    "prime_rl": {"offdrift/adapters/contrib/prime_rl.py"},
    "slime": {"offdrift/adapters/contrib/slime.py"},
    "nemo_rl": {"offdrift/adapters/contrib/nemo_rl.py"},
    "megatron": {"offdrift/adapters/contrib/slime.py"},
    "skyrl": {"offdrift/adapters/contrib/skyrl.py"},
    "peft": {"offdrift_lab/train/features/lora_adapters.py"},
    "math_verify": {"offdrift_lab/train/data/math_answers.py"},
}
LIBRARIES_OF_THE_CORE = {"torch", "numpy", "jaxtyping", "offdrift", "offdrift_lab"} | set(sys.stdlib_module_names)

FILES = sorted(path for package in LEVELS for path in (SOURCE / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def room_of(path: Path) -> str:
    package, room = path.relative_to(SOURCE).parts[:2]
    return f"{package}.{room.removesuffix('.py')}"


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            found.add(node.module or "")
    return found


def test_imports_point_downwards():
    wrong = []
    for path in FILES:
        room = room_of(path)
        package = room.split(".")[0]
        for module in imported(path):
            other = ".".join(module.split(".")[:2])
            if other in (room, package) or other not in LEVEL or room.endswith("__init__"):
                continue
            same = other.startswith(f"{package}.")
            if (same and LEVEL[other] >= LEVEL[room]) or (not same and package == "offdrift"):
                wrong.append(f"{name_of(path)} imports {module}")
    assert wrong == []


def test_the_package_names_the_laboratory_only_in_its_table_of_commands():
    """A string would do what an import may not: two files may hold one."""
    named = [name_of(p) for p in FILES if p.parts[-2] != "offdrift_lab" and "offdrift_lab" in p.read_text("utf-8")]
    outside = [name for name in named if name.startswith("offdrift/")]
    assert outside == ["offdrift/__init__.py", DOOR, "offdrift/moved.py"]


def test_third_parties_stay_where_they_belong():
    wrong = []
    for path in FILES:
        for module in imported(path):
            top = module.split(".")[0]
            places = ALLOWED.get(top, {""} if room_of(path) not in CORE or top in LIBRARIES_OF_THE_CORE else set())
            if not any(name_of(path).startswith(place) for place in places):
                wrong.append(f"{name_of(path)} imports {module}")
    assert wrong == []


def test_every_room_has_a_level_and_every_level_a_room():
    assert len(FILES) > 40
    rooms = {room_of(p) for p in FILES} - {f"{package}.__init__" for package in LEVELS}
    assert rooms == set(LEVEL)


def test_importing_the_library_loads_no_engine_framework_or_report():
    heavy = sorted(ALLOWED)
    program = (
        f"import sys, offdrift, offdrift.stats; print([m for m in {heavy!r} if m in sys.modules]); "
        "from offdrift.compiled.build import _loaded; print(_loaded)"
    )
    environment = os.environ | {"OFFDRIFT_COMPILE": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["[]", "{}"]
