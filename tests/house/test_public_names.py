"""The exported names are a promise: few, listed, documented, with an example that runs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import offdrift

NAMES = {
    "BatchEvidence", "BatchInfo", "Bound", "Certificate", "Clipped", "Correction", "Divergence", "DriftStats", "Gate", "Grade", "Head",
    "ImportanceSampled", "KLPenalty", "LogProbs", "METHODS", "METRICS", "Method", "Observed",
    "OffdriftError", "PolicyLoss",
    "Recorder", "Reinforce", "Segments", "TrustRegion", "Weight", "advantage", "advantages", "aggregate", "all_bounds", "audit",
    "certify", "check",
    "exact_divergences", "hidden_divergences", "log_ratio", "log_to", "method", "normalizer_of", "objective", "override", "per_unit",
    "policy_loss", "record", "rejection", "statistic", "summarize", "topk_divergences", "unified", "weight",
}  # fmt: skip
FUNCTIONS = sorted(n for n in NAMES if inspect.isfunction(getattr(offdrift, n, None)))


def exported() -> set[str]:
    names = (n for n in dir(offdrift) if not n.startswith("_"))
    return {n for n in names if not inspect.ismodule(getattr(offdrift, n))}


def test_exactly_these_names_are_exported():
    assert exported() == NAMES
    assert len(NAMES) <= 60


def test_type_checkers_and_the_running_program_see_the_same_names():
    source = ast.parse(Path(offdrift.__file__).read_text("utf-8"))
    (block,) = [n for n in source.body if isinstance(n, ast.If) and ast.unparse(n.test) == "typing.TYPE_CHECKING"]
    listed = {alias.asname: node.module for node in block.body for alias in node.names}
    assert listed == offdrift._HOME


def test_a_function_is_not_hidden_by_the_module_of_its_name():
    code = (
        "import offdrift.aggregate, offdrift.advantages.base, offdrift as od\n"
        "assert callable(od.aggregate) and callable(od.advantages)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_say_what_raises_and_show_an_example(name):
    text = inspect.getdoc(getattr(offdrift, name)) or ""
    assert len(text.splitlines()[0]) > 20
    assert ">>>" in text or name == "normalizer_of"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_at_most_five_positional_parameters_the_rest_by_keyword(name):
    parameters = inspect.signature(getattr(offdrift, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) <= 5


def test_functions_were_found():
    assert len(FUNCTIONS) >= 13
