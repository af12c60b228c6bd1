"""Alarms: findings of a run that is watched, sent to where people look."""
