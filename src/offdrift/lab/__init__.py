"""Exact experiments on tabular and Markov policies, whose expectations are finite sums."""

from offdrift.lab.policy import TabularPolicy as TabularPolicy
from offdrift.lab.policy import divergences as divergences
from offdrift.lab.policy import perturbed as perturbed
from offdrift.lab.policy import random_policies as random_policies
from offdrift.lab.policy import returns as returns
from offdrift.lab.policy import tilted_pair as tilted_pair
from offdrift.lab.policy import worst_rewards as worst_rewards
