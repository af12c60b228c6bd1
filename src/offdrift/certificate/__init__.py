"""Guarantees about an update, from the divergence of the rollout and the current policy.

`certify.certify` and `batch.BatchEvidence` are imported by their modules: they need torch, the bounds do not.
"""

from offdrift.certificate.bounds import Bound as Bound
from offdrift.certificate.bounds import all_bounds as all_bounds
from offdrift.certificate.bounds import sequence_kl as sequence_kl
from offdrift.certificate.bounds import tightest as tightest
from offdrift.certificate.bounds import unified as unified
from offdrift.certificate.confidence import bernstein as bernstein
from offdrift.certificate.confidence import betting as betting
from offdrift.certificate.confidence import clopper_pearson as clopper_pearson
from offdrift.certificate.confidence import cluster_means as cluster_means
from offdrift.certificate.confidence import missing_mass as missing_mass
from offdrift.certificate.confidence import rule_of_three as rule_of_three
from offdrift.certificate.guarantees import Guarantee as Guarantee
from offdrift.certificate.guarantees import masked_guarantee as masked_guarantee
from offdrift.certificate.guarantees import three_policy as three_policy
from offdrift.certificate.guarantees import trm_guarantee as trm_guarantee
from offdrift.certificate.inverse import largest as largest
from offdrift.certificate.inverse import route_crossovers as route_crossovers
from offdrift.certificate.inverse import vacuous_horizon as vacuous_horizon
from offdrift.certificate.looks import Looks as Looks
from offdrift.certificate.premises import Premises as Premises
from offdrift.certificate.premises import premises as premises
from offdrift.certificate.regions import TrustRegion as TrustRegion
from offdrift.certificate.regions import length_neutral as length_neutral
from offdrift.certificate.regions import sample_ratio_error as sample_ratio_error
from offdrift.certificate.verdict import Certificate as Certificate
