"""Advantage estimators: from rewards to advantages, by name, without gradient."""

from offdrift.advantages.base import Credit as Credit
from offdrift.advantages.table import ADVANTAGES as ADVANTAGES
from offdrift.advantages.table import AdvantageName as AdvantageName
from offdrift.advantages.table import Estimator as Estimator
from offdrift.advantages.table import advantages as advantages
from offdrift.advantages.token import generalized_advantage as generalized_advantage
from offdrift.advantages.token import returns_to_go as returns_to_go
