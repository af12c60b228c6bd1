"""Schedules of asynchronous runs: rules, the table of published compositions, and the scheduler that they decide in."""

from offdrift_lab.schedules.ledger import Cancel as Cancel
from offdrift_lab.schedules.ledger import Key as Key
from offdrift_lab.schedules.ledger import Load as Load
from offdrift_lab.schedules.ledger import Start as Start
from offdrift_lab.schedules.ledger import Train as Train
from offdrift_lab.schedules.scheduler import Scheduler as Scheduler
from offdrift_lab.schedules.table import SCHEDULES as SCHEDULES
from offdrift_lab.schedules.table import Schedule as Schedule
from offdrift_lab.schedules.table import override as override
from offdrift_lab.schedules.table import schedule as schedule
