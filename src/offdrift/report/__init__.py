"""Shows what a run stored, as one self-contained HTML page; it computes nothing new."""

from offdrift.report.page import write_report as write_report
