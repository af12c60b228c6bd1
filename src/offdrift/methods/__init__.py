"""Every named method as a composition of parts."""

from offdrift.methods.method import Method as Method
from offdrift.methods.method import override as override
from offdrift.methods.table import METHODS as METHODS
from offdrift.methods.table import method as method
