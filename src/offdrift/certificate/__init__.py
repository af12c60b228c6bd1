"""What can be proved about an update from the divergence of the two policies."""

from offdrift.certificate.bounds import Bound as Bound
from offdrift.certificate.bounds import all_bounds as all_bounds
from offdrift.certificate.bounds import tightest as tightest
from offdrift.certificate.bounds import unified as unified
from offdrift.certificate.premises import Premises as Premises
from offdrift.certificate.premises import premises as premises
