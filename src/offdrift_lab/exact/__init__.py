"""Exact experiments on tabular and Markov policies, whose expectations are finite sums."""

from offdrift_lab.exact.policy import TabularPolicy as TabularPolicy
from offdrift_lab.exact.policy import divergences as divergences
from offdrift_lab.exact.policy import perturbed as perturbed
from offdrift_lab.exact.policy import random_policies as random_policies
from offdrift_lab.exact.policy import returns as returns
from offdrift_lab.exact.policy import tilted_pair as tilted_pair
from offdrift_lab.exact.policy import worst_rewards as worst_rewards
