"""Schedules of asynchronous runs: rules, the table of published compositions, and the scheduler that they decide in."""

from offdrift.schedules.ledger import Cancel as Cancel
from offdrift.schedules.ledger import Key as Key
from offdrift.schedules.ledger import Load as Load
from offdrift.schedules.ledger import Start as Start
from offdrift.schedules.ledger import Train as Train
from offdrift.schedules.scheduler import Scheduler as Scheduler
from offdrift.schedules.table import SCHEDULES as SCHEDULES
from offdrift.schedules.table import Schedule as Schedule
from offdrift.schedules.table import override as override
from offdrift.schedules.table import schedule as schedule
