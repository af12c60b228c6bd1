"""Objectives: per-token losses that carry the gradient. One file per idea; the most common ones are exported."""

from offdrift.objectives.base import Objective as Objective
from offdrift.objectives.base import TokenLoss as TokenLoss
from offdrift.objectives.clipped import Clipped as Clipped
from offdrift.objectives.reinforce import ImportanceSampled as ImportanceSampled
from offdrift.objectives.reinforce import Reinforce as Reinforce
