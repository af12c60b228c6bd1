"""Exact experiments on tabular and Markov policies, whose expectations are finite sums."""

from offdrift.lab.bias import Problem as Problem
from offdrift.lab.bias import expected_gradient as expected_gradient
from offdrift.lab.bias import measured_bias as measured_bias
from offdrift.lab.bias import random_problem as random_problem
from offdrift.lab.bias import relative_bias as relative_bias
from offdrift.lab.bias import standard_problems as standard_problems
from offdrift.lab.bias import true_gradient as true_gradient
from offdrift.lab.markov import Automaton as Automaton
from offdrift.lab.markov import MarkovPolicy as MarkovPolicy
from offdrift.lab.markov import random_markov as random_markov
from offdrift.lab.markov import shifted as shifted
from offdrift.lab.policy import Divergences as Divergences
from offdrift.lab.policy import Returns as Returns
from offdrift.lab.policy import TabularPolicy as TabularPolicy
from offdrift.lab.policy import divergences as divergences
from offdrift.lab.policy import perturbed as perturbed
from offdrift.lab.policy import random_policies as random_policies
from offdrift.lab.policy import returns as returns
from offdrift.lab.policy import tilted_pair as tilted_pair
from offdrift.lab.policy import worst_rewards as worst_rewards
from offdrift.lab.recursions import MarkovDivergences as MarkovDivergences
from offdrift.lab.recursions import markov_divergences as markov_divergences
from offdrift.lab.recursions import markov_returns as markov_returns
