"""Schedules as arithmetic: tasks and their orders, simulated times, bounds, and what a cut of a model costs.

Nothing here needs torch or reads a file.
"""
