"""The laboratory: a trainer under real drift, schedules and their planner, exact experiments, and evidence from runs.

`offdrift` acts on other people's runs; this package makes runs of its own, and builds on it. It is reached by path:
`offdrift_lab.train`, `offdrift_lab.schedules`, `offdrift_lab.plan`, `offdrift_lab.exact`, `offdrift_lab.evidence`.
"""
