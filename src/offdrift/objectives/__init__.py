"""Objectives: what is pushed, and how hard. One file per idea; these are the ones met most often."""

from offdrift.objectives.base import Objective as Objective
from offdrift.objectives.base import TokenLoss as TokenLoss
from offdrift.objectives.clipped import Clipped as Clipped
from offdrift.objectives.reinforce import ImportanceSampled as ImportanceSampled
from offdrift.objectives.reinforce import Reinforce as Reinforce
