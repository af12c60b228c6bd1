"""The exported names are a promise: few, listed, documented, with an example that runs."""

import inspect

import pytest

import offdrift

NAMES = {
    "BatchEvidence", "Bound", "Certificate", "Clipped", "Correction", "Divergence", "DriftStats", "Gate", "Grade", "Head",
    "ImportanceSampled", "KLPenalty", "LogProbs", "METHODS", "METRICS", "Method", "Observed",
    "OffdriftError", "PolicyLoss",
    "Reinforce", "Segments", "TrustRegion", "Weight", "advantages", "aggregate", "all_bounds", "certify",
    "exact_divergences", "hidden_divergences", "log_ratio", "method", "normalizer_of", "override", "per_unit",
    "policy_loss", "rejection", "summarize", "topk_divergences", "unified",
}  # fmt: skip
FUNCTIONS = sorted(n for n in NAMES if inspect.isfunction(getattr(offdrift, n, None)))


def exported() -> set[str]:
    return {
        n for n, v in vars(offdrift).items() if not n.startswith("_") and not inspect.ismodule(v)
    }


def test_exactly_these_names_are_exported():
    assert exported() == NAMES
    assert len(NAMES) <= 60


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
