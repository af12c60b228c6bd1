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
    from offdrift.certificate.guarantees import Certificate as Certificate
    from offdrift.certificate.regions import TrustRegion as TrustRegion
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

# The same list for the running program: where each name is defined.
_NAMES = {
    "offdrift.advantages": "advantages",
    "offdrift.aggregate": "aggregate normalizer_of",
    "offdrift.batch_info": "BatchInfo Observed",
    "offdrift.certificate.batch": "BatchEvidence",
    "offdrift.certificate.bounds": "Bound all_bounds unified",
    "offdrift.certificate.certify": "certify",
    "offdrift.certificate.regions": "TrustRegion",
    "offdrift.certificate.guarantees": "Certificate",
    "offdrift.correction": "Correction Gate Weight rejection",
    "offdrift.divergence.evidence": "Divergence Grade",
    "offdrift.divergence.fused": "exact_divergences",
    "offdrift.divergence.head": "Head",
    "offdrift.divergence.hidden": "hidden_divergences",
    "offdrift.divergence.interval": "topk_divergences",
    "offdrift.errors": "OffdriftError",
    "offdrift.logprobs": "LogProbs",
    "offdrift.loss": "PolicyLoss policy_loss",
    "offdrift.methods": "METHODS Method method override",
    "offdrift.objectives": "Clipped ImportanceSampled Reinforce",
    "offdrift.penalty": "KLPenalty",
    "offdrift.ratios": "log_ratio per_unit",
    "offdrift.records.recorder": "Recorder record",
    "offdrift.segments": "Segments",
    "offdrift.stats": "METRICS DriftStats summarize",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


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
