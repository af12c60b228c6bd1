"""`action.yml` and the workflow of docs/check-in-ci.md: their shell is run, and every option is one that there is."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from offdrift.cli.exit_codes import ExitCode
from offdrift.models import save_for_engine, tiny_tokenizer
from tests.engines.models import CACHE_MIB, need_vllm, tiny
from tests.engines.serving import serving
from tests.house.test_evidence import parsed

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
STEPS = {step.get("name", step.get("uses")): step for step in ACTION["runs"]["steps"]}
PAGE = (ROOT / "docs" / "check-in-ci.md").read_text("utf-8")
WORKFLOW, PLAIN = (yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S))
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")
"""As GitHub calls it for `shell: bash`."""


class Ran(NamedTuple):
    """How a step ended."""

    code: int
    log: str
    outputs: dict[str, str]
    summary: str


def run_step(name: str, folder: Path, program: Path | None = None, **inputs: str) -> Ran:
    """Run the script of a step of the action, with inputs in place of their defaults.

    Args:
        folder: working directory, which also holds the runner's temporary files.
        program: what stands where the action installs `offdrift`.
    """
    step = STEPS[name]
    given = {key: str(entry.get("default", "")) for key, entry in ACTION["inputs"].items()} | inputs
    expression = re.compile(r"\$\{\{ inputs\.([\w-]+) \}\}")
    env = {key: expression.sub(lambda m: given[m[1]], str(value)) for key, value in step["env"].items()}
    home = folder / "runner" / "offdrift" / "bin"
    home.mkdir(parents=True, exist_ok=True)
    for link, target in (("python", sys.executable), ("offdrift", program or installed(folder))):
        (home / link).unlink(missing_ok=True)
        (home / link).symlink_to(target)
    files = {key: folder / key.lower() for key in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    for file in files.values():
        file.write_text("")
    script = folder / "step.sh"
    script.write_text(step["run"])
    env |= {key: str(file) for key, file in files.items()} | {"RUNNER_TEMP": str(folder / "runner")}
    done = subprocess.run([*BASH, script], env=os.environ | env, cwd=folder, capture_output=True, text=True)
    lines = files["GITHUB_OUTPUT"].read_text().splitlines()
    return Ran(
        done.returncode,
        done.stdout + done.stderr,
        dict(line.split("=", 1) for line in lines),
        files["GITHUB_STEP_SUMMARY"].read_text(),
    )


def installed(folder: Path) -> Path:
    """The command of this checkout, as a file."""
    path = folder / "offdrift"
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m offdrift "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def stand_in(tmp_path):
    """A program that writes down what it is called with."""
    path = tmp_path / "stand-in"
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > called\n')
    path.chmod(0o755)
    return path


def called(folder: Path, stand_in: Path, **inputs: str) -> list[str]:
    """Words with which the action calls `offdrift`."""
    run_step("Check", folder, stand_in, **inputs)
    return (folder / "called").read_text().splitlines()


def test_a_server_that_wants_a_key_is_there(tmp_path):
    """The step that waits has no key, and needs none."""

    class Locked(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(401)
            self.end_headers()

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        try:
            waited = run_step(
                "Wait for the server", tmp_path, server=f"http://127.0.0.1:{server.server_port}/v1", wait="2"
            )
        finally:
            server.shutdown()
    assert (waited.code, "answers" in waited.log) == (0, True)


SERVER = {"server": "http://127.0.0.1:8000/v1", "model": "./checkpoint"}
SOME = {
    "defaults": ({}, {"max_kl": None, "claim": None, "factors": "none"}),
    "all": ({"max-kl": "0.02", "claim": "equal", "out": "there"}, {"max_kl": 0.02, "claim": "equal", "out": Path("there")}),
    "options": ({"args": "--factors train_dtype --max-prompts 8"}, {"factors": "train_dtype", "max_prompts": 8}),
    "no options": ({"args": ""}, {"factors": "all"}),
    "sglang": ({"server": "sglang:http://h:1"}, {"rollout": "sglang:http://h:1"}),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "options"), SOME.values(), ids=list(SOME))
def test_every_option_is_one_of_the_command(inputs, options, tmp_path, stand_in):
    read = parsed(called(tmp_path, stand_in, **{**SERVER, **inputs}))
    assert read["model"] == "./checkpoint"
    expected = {"rollout": "openai:http://127.0.0.1:8000/v1"} | options
    assert {key: read[key] for key in expected} == expected


def test_an_input_is_never_part_of_a_script(tmp_path, stand_in):
    """A model's name that is a command stays a name."""
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step.get("run", "")
    odd = '$(touch harm); `touch harm`"; touch harm; "'
    words = called(tmp_path, stand_in, server="http://h", model=odd, args="$(touch harm)")
    assert words[words.index("--model") + 1] == odd
    assert not (tmp_path / "harm").exists()


def test_what_the_action_promises_it_has():
    assert {"server", "model", "max-kl", "claim", "args", "python-version"} <= set(ACTION["inputs"])
    assert {"verdict", "kl", "status"} == set(ACTION["outputs"])
    text = (ROOT / "action.yml").read_text("utf-8")
    assert set(re.findall(r"inputs\.([\w-]+)", text)) == set(ACTION["inputs"])
    identified = {step["id"] for step in ACTION["runs"]["steps"] if "id" in step}
    assert set(re.findall(r"steps\.(\w+)\.", text)) <= identified
    assert all(step["shell"] == "bash" for step in ACTION["runs"]["steps"] if "run" in step)


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    (job,) = workflow["jobs"].values()
    return job["steps"]


def test_the_workflow_uses_the_action_as_it_is(tmp_path, stand_in):
    (step,) = (s for s in steps_of(WORKFLOW) if "/offdrift@" in s.get("uses", ""))
    assert set(step["with"]) <= set(ACTION["inputs"])
    needed = {key for key, entry in ACTION["inputs"].items() if entry.get("required")}
    assert needed <= set(step["with"])
    read = parsed(called(tmp_path, stand_in, **{k: str(v) for k, v in step["with"].items()}))
    assert read["max_kl"] == 0.02
    (stored,) = (s for s in steps_of(WORKFLOW) if "upload-artifact" in s.get("uses", ""))
    assert stored["if"] == "always()"
    assert ACTION["inputs"]["out"]["default"] in stored["with"]["path"].split()
    used = set(re.findall(r"steps\.drift\.outputs\.(\w+)", PAGE))
    assert used
    assert used <= set(ACTION["outputs"])


def commands_of(workflow: dict[str, Any], program: str) -> list[list[str]]:
    """Words of every call of a program in the steps of a workflow."""
    lines = "\n".join(step.get("run", "") for step in steps_of(workflow)).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip().startswith(program + " ")]


def test_the_steps_without_the_action_are_commands_that_can_be_read():
    ((_, *words),) = commands_of(PLAIN, "offdrift")
    read = parsed([word for word in words if word not in (">", "check.json")])
    assert read["max_kl"] == 0.02
    for workflow in (WORKFLOW, PLAIN):
        for step in steps_of(workflow):
            subprocess.run(["bash", "-n"], input=step.get("run", ""), text=True, check=True)


def test_the_exit_statuses_that_the_page_lists_are_those_of_the_command():
    rows = re.findall(r"^\| (\d+) \| `(\w+)`", PAGE, re.M)
    assert {int(code) for code, _ in rows} == {int(code) for code in ExitCode} - {int(ExitCode.INTERRUPTED)}


@pytest.mark.parametrize("step", ["Wait for the server", "Check"])
def test_a_server_that_is_not_there_fails_the_step_and_says_so(step, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    done = run_step(step, tmp_path, server=address, model="tiny-qwen3", wait="2")
    assert done.code == 1, done.log
    assert address in done.log
    if step == "Check":
        assert done.outputs == {"verdict": "error", "kl": "", "status": "1"}


def test_a_result_of_an_earlier_run_is_not_reported_again(tmp_path, stand_in):
    (tmp_path / "check").mkdir()
    (tmp_path / "check" / "check.json").write_text('{"verdict": {"level": "ok"}}')
    assert run_step("Check", tmp_path, stand_in, **SERVER).outputs["verdict"] == "error"


READ_BY_VLLM = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]).generation_config)
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_the_options_of_the_server_in_the_page_are_vllms():
    need_vllm()
    calls = [words for workflow in (WORKFLOW, PLAIN) for words in commands_of(workflow, "docker run")]
    for words in calls:
        options = words[words.index("$IMAGE") + 1 :]
        done = subprocess.run([sys.executable, "-c", READ_BY_VLLM, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == "vllm"
    assert len(calls) == 2


FLAGS = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16", "--max-logprobs", "-1",
    "--generation-config", "vllm", "--kv-cache-memory-bytes", str(CACHE_MIB * 2**20),
)  # fmt: skip


@pytest.mark.vllm
@pytest.mark.slow
def test_the_action_passes_a_real_server_and_fails_it_on_a_limit_and_on_other_weights(tmp_path):
    """The steps after the installation, as their shell stands in the file, against vLLM on this machine."""
    folder, other = str(tmp_path / "served"), str(tmp_path / "other")
    save_for_engine(tiny("dense"), tiny_tokenizer(), folder)
    moved = tiny("dense")
    moved.model.layers[1].mlp.up_proj.weight.data *= 1.03
    save_for_engine(moved, tiny_tokenizer(), other)
    few = {"args": "--factors none --max-prompts 4 --max-tokens 8"}
    with serving(folder, tmp_path, *FLAGS) as url:
        assert run_step("Wait for the server", tmp_path, server=url, wait="10").code == 0
        fine = run_step("Check", tmp_path, server=url, model=folder, **few, **{"max-kl": "0.001"})
        assert fine.code == 0, fine.log
        assert (fine.outputs["verdict"], fine.outputs["status"]) == ("ok", "0")
        found = json.loads((tmp_path / "check" / "check.json").read_text())
        assert float(fine.outputs["kl"]) == found["baseline"]["kl_mean"] < 1e-6
        assert (tmp_path / "check" / "check.html").is_file()
        assert found["verdict"]["text"] in fine.summary
        small = run_step("Check", tmp_path, server=url, model=folder, **few, **{"max-kl": "1e-30"})
        assert (small.code, small.outputs["status"]) == (3, "3"), small.log
        wrong = run_step("Check", tmp_path, server=url, model=other, **few)
        assert (wrong.code, wrong.outputs["verdict"]) == (3, "act"), wrong.log
        claimed = run_step("Check", tmp_path, server=url, model=folder, claim="equal", **few)
        assert claimed.code in (0, 3), claimed.log
        assert claimed.outputs["status"] == str(claimed.code)
        claim = json.loads((tmp_path / "check" / "check.json").read_text())
        assert claim["claim"]["equal"] is (claimed.code == 0)
        assert claim["server"]["prompts"]["same"] is claim["server"]["defaults"]["neutral"] is True
