"""What can be proved about an update from the divergence of the two policies."""

from offdrift.certificate.batch import BatchEvidence as BatchEvidence
from offdrift.certificate.bounds import Bound as Bound
from offdrift.certificate.bounds import all_bounds as all_bounds
from offdrift.certificate.bounds import sequence_kl as sequence_kl
from offdrift.certificate.bounds import tightest as tightest
from offdrift.certificate.bounds import unified as unified
from offdrift.certificate.certify import certify as certify
from offdrift.certificate.guarantees import Guarantee as Guarantee
from offdrift.certificate.guarantees import masked_guarantee as masked_guarantee
from offdrift.certificate.guarantees import trm_guarantee as trm_guarantee
from offdrift.certificate.premises import Premises as Premises
from offdrift.certificate.premises import premises as premises
from offdrift.certificate.regions import TrustRegion as TrustRegion
from offdrift.certificate.verdict import Certificate as Certificate
