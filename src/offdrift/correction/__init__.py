"""Gates, weights and their composition."""

from offdrift.correction.compose import Corrected as Corrected
from offdrift.correction.compose import Correction as Correction
from offdrift.correction.gate import Gate as Gate
from offdrift.correction.weight import Weight as Weight
