"""Worlds: the ranks of a group with all their state; how a process joins and leaves them, and what is called there."""
