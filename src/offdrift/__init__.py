"""offdrift: measure, correct and certify off-policy drift in RL of language models.

    import offdrift as od

    lp = od.LogProbs.pack(logp_rollout, logp, mask=mask)            # validates
    result = od.policy_loss(lp, od.method("token_tis"), advantages)
    result.loss.backward()
    od.summarize(result.stats)                                      # every metric, one transfer

Everything here depends on torch and numpy alone. Engines, the trainer and the report are imported
by path: `offdrift.engines`, `offdrift.train`, `offdrift.show`. `record` and `Recorder` need pyarrow.

A name is imported when it is first used, so that `import offdrift` and the help of the command line
do not wait for torch.
"""

import importlib
import importlib.util
import sys
import types
import typing

if typing.TYPE_CHECKING:
    from offdrift.advantages import advantages as advantages
    from offdrift.aggregate import aggregate as aggregate
    from offdrift.aggregate import normalizer_of as normalizer_of
    from offdrift.batch_info import BatchInfo as BatchInfo
    from offdrift.batch_info import Observed as Observed
    from offdrift.certificate.batch import BatchEvidence as BatchEvidence
    from offdrift.certificate.bounds import Bound as Bound
    from offdrift.certificate.bounds import all_bounds as all_bounds
    from offdrift.certificate.bounds import unified as unified
    from offdrift.certificate.certify import certify as certify
    from offdrift.certificate.regions import TrustRegion as TrustRegion
    from offdrift.certificate.verdict import Certificate as Certificate
    from offdrift.correction import Correction as Correction
    from offdrift.correction import Gate as Gate
    from offdrift.correction import Weight as Weight
    from offdrift.correction import rejection as rejection
    from offdrift.divergence.evidence import Divergence as Divergence
    from offdrift.divergence.evidence import Grade as Grade
    from offdrift.divergence.fused import exact_divergences as exact_divergences
    from offdrift.divergence.head import Head as Head
    from offdrift.divergence.hidden import hidden_divergences as hidden_divergences
    from offdrift.divergence.interval import topk_divergences as topk_divergences
    from offdrift.errors import OffdriftError as OffdriftError
    from offdrift.logprobs import LogProbs as LogProbs
    from offdrift.loss import PolicyLoss as PolicyLoss
    from offdrift.loss import policy_loss as policy_loss
    from offdrift.methods import METHODS as METHODS
    from offdrift.methods import Method as Method
    from offdrift.methods import method as method
    from offdrift.methods import override as override
    from offdrift.objectives import Clipped as Clipped
    from offdrift.objectives import ImportanceSampled as ImportanceSampled
    from offdrift.objectives import Reinforce as Reinforce
    from offdrift.penalty import KLPenalty as KLPenalty
    from offdrift.ratios import log_ratio as log_ratio
    from offdrift.ratios import per_unit as per_unit
    from offdrift.records.recorder import Recorder as Recorder
    from offdrift.records.recorder import record as record
    from offdrift.segments import Segments as Segments
    from offdrift.stats import METRICS as METRICS
    from offdrift.stats import DriftStats as DriftStats
    from offdrift.stats import summarize as summarize

# The same list for the running program.
_HOME = {
    "advantages": "offdrift.advantages",
    "aggregate": "offdrift.aggregate",
    "normalizer_of": "offdrift.aggregate",
    "BatchInfo": "offdrift.batch_info",
    "Observed": "offdrift.batch_info",
    "BatchEvidence": "offdrift.certificate.batch",
    "Bound": "offdrift.certificate.bounds",
    "all_bounds": "offdrift.certificate.bounds",
    "unified": "offdrift.certificate.bounds",
    "certify": "offdrift.certificate.certify",
    "TrustRegion": "offdrift.certificate.regions",
    "Certificate": "offdrift.certificate.verdict",
    "Correction": "offdrift.correction",
    "Gate": "offdrift.correction",
    "Weight": "offdrift.correction",
    "rejection": "offdrift.correction",
    "Divergence": "offdrift.divergence.evidence",
    "Grade": "offdrift.divergence.evidence",
    "exact_divergences": "offdrift.divergence.fused",
    "Head": "offdrift.divergence.head",
    "hidden_divergences": "offdrift.divergence.hidden",
    "topk_divergences": "offdrift.divergence.interval",
    "OffdriftError": "offdrift.errors",
    "LogProbs": "offdrift.logprobs",
    "PolicyLoss": "offdrift.loss",
    "policy_loss": "offdrift.loss",
    "METHODS": "offdrift.methods",
    "Method": "offdrift.methods",
    "method": "offdrift.methods",
    "override": "offdrift.methods",
    "Clipped": "offdrift.objectives",
    "ImportanceSampled": "offdrift.objectives",
    "Reinforce": "offdrift.objectives",
    "KLPenalty": "offdrift.penalty",
    "log_ratio": "offdrift.ratios",
    "per_unit": "offdrift.ratios",
    "Segments": "offdrift.segments",
    "METRICS": "offdrift.stats",
    "DriftStats": "offdrift.stats",
    "summarize": "offdrift.stats",
    "Recorder": "offdrift.records.recorder",
    "record": "offdrift.records.recorder",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


def __getattr__(name: str) -> typing.Any:
    if name in _HOME:
        try:
            value = getattr(importlib.import_module(_HOME[name]), name)
        except ModuleNotFoundError as e:
            if e.name != "pyarrow":
                raise
            raise ModuleNotFoundError(
                f"offdrift.{name} writes Parquet: pip install 'offdrift[audit]'", name="pyarrow"
            ) from e
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(types.ModuleType):
    """Keeps `offdrift.advantages` and `offdrift.aggregate` functions.

    Python sets a submodule as an attribute of its package when it is imported, which would hide the
    function of the same name.
    """

    def __setattr__(self, name: str, value: typing.Any) -> None:
        if isinstance(value, types.ModuleType) and _HOME.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
