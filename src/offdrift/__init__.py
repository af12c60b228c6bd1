"""offdrift: measure, correct and certify off-policy drift in RL of language models.

    import offdrift as od

    lp = od.LogProbs.pack(logp_rollout, logp, mask=mask)            # validates
    result = od.policy_loss(lp, od.method("token_tis"), advantages)
    result.loss.backward()
    od.summarize(result.stats)                                      # every metric, one transfer

    od.audit("runs/tiny/arms/none").verdict                         # a log: what drifted, why, what to do
    od.check("./checkpoint", quick=True).metrics["kl_mean"]         # two engines at the same weights

All but four names depend on torch and numpy alone: `record`, `Recorder` and `audit` need `offdrift[audit]`, `check`
needs `offdrift[train]`. Engines, the trainer and the report are imported by path: `offdrift.engines`,
`offdrift_lab.train`, `offdrift.show`.

A name is imported when it is first used, so that `import offdrift` and the help of the command line
do not wait for torch.
"""

import importlib
import importlib.util
import sys
import types
import typing

from offdrift import moved

if typing.TYPE_CHECKING:
    from offdrift.adapters.log_to import log_to as log_to
    from offdrift.advantages import advantages as advantages
    from offdrift.aggregate import aggregate as aggregate
    from offdrift.aggregate import normalizer_of as normalizer_of
    from offdrift.audit.entry import audit as audit
    from offdrift.batch_info import BatchInfo as BatchInfo
    from offdrift.batch_info import Observed as Observed
    from offdrift.certificate.batch import BatchEvidence as BatchEvidence
    from offdrift.certificate.bounds import Bound as Bound
    from offdrift.certificate.bounds import all_bounds as all_bounds
    from offdrift.certificate.bounds import unified as unified
    from offdrift.certificate.certify import certify as certify
    from offdrift.certificate.guarantees import Certificate as Certificate
    from offdrift.certificate.regions import TrustRegion as TrustRegion
    from offdrift.check.entry import check as check
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
    from offdrift.methods.parts import advantage as advantage
    from offdrift.methods.parts import objective as objective
    from offdrift.methods.parts import statistic as statistic
    from offdrift.methods.parts import weight as weight
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
    "offdrift.adapters.log_to": "log_to",
    "offdrift.advantages": "advantages",
    "offdrift.aggregate": "aggregate normalizer_of",
    "offdrift.audit.entry": "audit",
    "offdrift.batch_info": "BatchInfo Observed",
    "offdrift.certificate.batch": "BatchEvidence",
    "offdrift.certificate.bounds": "Bound all_bounds unified",
    "offdrift.certificate.certify": "certify",
    "offdrift.certificate.regions": "TrustRegion",
    "offdrift.certificate.guarantees": "Certificate",
    "offdrift.check.entry": "check",
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
    "offdrift.methods.parts": "advantage objective statistic weight",
    "offdrift.objectives": "Clipped ImportanceSampled Reinforce",
    "offdrift.penalty": "KLPenalty",
    "offdrift.ratios": "log_ratio per_unit",
    "offdrift.records.recorder": "Recorder record",
    "offdrift.segments": "Segments",
    "offdrift.stats": "METRICS DriftStats summarize",
}
_EXTRAS = {"pyarrow": "audit", "rich": "audit", "jinja2": "audit", "orjson": "audit", "transformers": "train"}
"""The extra that brings what a name needs besides torch and numpy."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


def __getattr__(name: str) -> typing.Any:
    if name in _HOME:
        try:
            value = getattr(importlib.import_module(_HOME[name]), name)
        except ModuleNotFoundError as e:
            if e.name not in _EXTRAS:
                raise
            raise ModuleNotFoundError(
                f"offdrift.{name} needs {e.name}: pip install 'offdrift[{_EXTRAS[e.name]}]'", name=e.name
            ) from e
        for below, module in _below(name).items():
            setattr(value, below, module)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _below(name: str) -> dict[str, types.ModuleType]:
    """The modules that were imported below a package, by name."""
    first = f"{__name__}.{name}."
    modules = {path.removeprefix(first): m for path, m in [*sys.modules.items()] if path.startswith(first)}
    return {below: module for below, module in modules.items() if "." not in below}


class _Package(types.ModuleType):
    """Keeps `offdrift.audit`, `offdrift.check`, `offdrift.advantages` and `offdrift.aggregate` functions.

    Python sets a submodule as an attribute of its package when it is imported, which would hide the function of the
    same name: the name stays the function's, and is looked up when it is first used.
    """

    def __setattr__(self, name: str, value: typing.Any) -> None:
        if isinstance(value, types.ModuleType) and name in _HOME and value.__name__ == f"{__name__}.{name}":
            value.__class__ = _Room
            return
        super().__setattr__(name, value)


class _Room(types.ModuleType):
    """A package that has a function of its name: the modules below it are attributes of the function, too.

    So both mean what they say: `offdrift.audit("log.jsonl")`, and `import offdrift.audit.stream as stream`. A callable
    package would do the same, but be no function for help, signatures and type checkers.
    """

    def __setattr__(self, name: str, value: typing.Any) -> None:
        super().__setattr__(name, value)
        function = vars(sys.modules[__name__]).get(self.__name__.rpartition(".")[2])
        if isinstance(value, types.ModuleType) and function is not None:
            setattr(function, name, value)


sys.modules[__name__].__class__ = _Package
moved.install()
