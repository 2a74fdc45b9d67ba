"""Schedules as arithmetic: orders of tasks, simulated times, lower bounds, and what a cut of a model costs.

Nothing here needs torch or reads a file.
"""
