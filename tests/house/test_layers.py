"""Imports point one way, and each heavy package is imported where it belongs and nowhere else."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "offdrift"

# A room may import rooms of a lower level, and its own. Moving a file means editing this on purpose.
LEVELS = [
    {"errors"},
    {"numerics", "texts"},
    {"segments"},
    {"logprobs"},
    {"ratios", "divergence"},
    {"batch_info"},
    {"correction"},
    {"objectives", "advantages", "aggregate", "penalty", "stats"},
    {"methods", "schedules"},
    {"loss"},
    {"certificate", "judge"},
    {"records"},
    {"engines", "show"},
    {"adapters"},
    # The products: each holds its logic and its views, and none imports another.
    {"check", "plan", "audit", "train", "lab", "prove"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: i for i, rooms in enumerate(LEVELS) for room in rooms}
CORE = {room for rooms in LEVELS[:11] for room in rooms} | {"lab", "__init__"}

# third party -> the only places that may import it
ALLOWED = {
    "vllm": {"engines/vllm/engine.py"},
    "transformers": {"engines/hf", "train/"},
    "accelerate": {"train/"},
    "pyarrow": {"records/"},
    "fsspec": {"records/readers/files.py"},
    "orjson": {"records/readers/"},
    "ray": {
        "engines/cluster.py",
        "engines/isolation.py",
        "audit/stream.py",
        "train/pipeline/",
        "train/sweep_workers.py",
    },
    "simpy": {"plan/"},
    "pydantic": {
        "train/fusion.py",
        "train/optim.py",
        "train/parts.py",
        "train/quantized.py",
        "train/recipe.py",
        "train/rollout_parts.py",
        "train/sweep.py",
        "plan/phases.py",
        "records/provenance.py",
    },
    "typer": {"cli/"},
    "rich": {
        "cli/",
        "show/",
        "lab/views.py",
        "lab/run_views.py",
        "check/view.py",
        "audit/view.py",
        "audit/compare.py",
        "audit/watch.py",
        "prove/",
        "plan/view.py",
        "train/view.py",
    },
    "triton": {"divergence/kernels_"},
    "safetensors": {"records/store.py", "engines/grids.py", "engines/server/engine.py", "train/"},
    "httpx": {"engines/server/client.py"},
    "httpcore": {"engines/server/client.py"},
    "matplotlib": {"show/png.py"},
    "jinja2": {"show/html.py"},
    "reasoning_gym": {"train/tasks.py", "train/rewards.py"},
    "prime_rl": {"adapters/contrib/prime_rl.py"},
    "slime": {"adapters/contrib/slime.py"},
    "nemo_rl": {"adapters/contrib/nemo_rl.py"},
    "megatron": {"adapters/contrib/slime.py"},
    "skyrl": {"adapters/contrib/skyrl.py"},
    "peft": {"train/lora.py"},
    "math_verify": {"train/math_answers.py"},
}
LIBRARIES_OF_THE_CORE = {"torch", "numpy", "jaxtyping", "offdrift"} | set(sys.stdlib_module_names)

FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


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
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in FILES
        if (room := room_of(path)) != "__init__"
        for module in imported(path)
        if module.startswith("offdrift.") and (other := module.split(".")[1]) != room and LEVEL[other] >= LEVEL[room]
    ]
    assert wrong == []


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
    rooms = {room_of(p) for p in FILES} - {"__init__"}
    assert rooms == set(LEVEL)


def test_importing_the_library_loads_no_engine_framework_or_report():
    heavy = sorted(ALLOWED)
    program = f"import sys, offdrift; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
