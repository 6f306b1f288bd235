"""Foundations of all other modules: errors, settings, messages, dtypes, reduction operations, launchers' variables.

Imports nothing from higher floors.
"""
