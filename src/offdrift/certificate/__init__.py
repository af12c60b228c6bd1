"""Guarantees about an update, from the divergence of the rollout and the current policy.

`certify.certify` and `batch.BatchEvidence` are imported by their modules: they need torch, the bounds do not.
"""

from offdrift.certificate.bounds import Bound as Bound
from offdrift.certificate.bounds import all_bounds as all_bounds
from offdrift.certificate.bounds import tightest as tightest
from offdrift.certificate.bounds import unified as unified
from offdrift.certificate.confidence import Looks as Looks
from offdrift.certificate.confidence import betting as betting
from offdrift.certificate.confidence import clopper_pearson as clopper_pearson
from offdrift.certificate.guarantees import Certificate as Certificate
from offdrift.certificate.premises import Premises as Premises
from offdrift.certificate.premises import premises as premises
from offdrift.certificate.regions import TrustRegion as TrustRegion
