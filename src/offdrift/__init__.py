"""offdrift: measure, correct and certify off-policy drift in RL of language models.

    import offdrift as od

    lp = od.LogProbs.pack(logp_rollout, logp, mask=mask)            # the door
    result = od.policy_loss(lp, od.method("token_tis"), advantages)
    result.loss.backward()
    od.summarize(result.stats)                                      # every metric, one transfer

Everything here depends on torch and numpy alone. Engines, the trainer and the report are imported
by path: `offdrift.engines`, `offdrift.train`, `offdrift.show`. `record` and `Recorder` need pyarrow,
which is imported when they are first asked for.
"""

import typing

from offdrift.advantages import advantages as advantages
from offdrift.aggregate import aggregate as aggregate
from offdrift.aggregate import normalizer_of as normalizer_of
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
from offdrift.segments import Segments as Segments
from offdrift.stats import METRICS as METRICS
from offdrift.stats import DriftStats as DriftStats
from offdrift.stats import summarize as summarize

if typing.TYPE_CHECKING:
    from offdrift.records.recorder import Recorder as Recorder
    from offdrift.records.recorder import record as record

_LAZY = {"record": "offdrift.records.recorder", "Recorder": "offdrift.records.recorder"}


def __getattr__(name: str) -> typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as e:
        if e.name != "pyarrow":
            raise
        raise ModuleNotFoundError(
            f"offdrift.{name} writes Parquet: pip install 'offdrift[audit]'", name="pyarrow"
        ) from e
