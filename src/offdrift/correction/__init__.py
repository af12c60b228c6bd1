"""Gates, weights and their composition."""

from offdrift.correction.acceptance import FollowingGate as FollowingGate
from offdrift.correction.acceptance import RandomGate as RandomGate
from offdrift.correction.compose import Corrected as Corrected
from offdrift.correction.compose import Correction as Correction
from offdrift.correction.gate import Gate as Gate
from offdrift.correction.gate import LengthNeutralGate as LengthNeutralGate
from offdrift.correction.gate import rejection as rejection
from offdrift.correction.weight import FutureWeight as FutureWeight
from offdrift.correction.weight import SignWeight as SignWeight
from offdrift.correction.weight import SurprisalWeight as SurprisalWeight
from offdrift.correction.weight import VariationalWeight as VariationalWeight
from offdrift.correction.weight import Weight as Weight
