"""Exact experiments on trees small enough to enumerate."""

from offdrift.lab.enumerate import Divergences as Divergences
from offdrift.lab.enumerate import Returns as Returns
from offdrift.lab.enumerate import divergences as divergences
from offdrift.lab.enumerate import returns as returns
from offdrift.lab.enumerate import worst_rewards as worst_rewards
from offdrift.lab.policy import TabularPolicy as TabularPolicy
from offdrift.lab.policy import perturbed as perturbed
from offdrift.lab.policy import random_policies as random_policies
from offdrift.lab.policy import tilted_pair as tilted_pair
