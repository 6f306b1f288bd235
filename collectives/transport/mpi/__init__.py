"""Processes connected by MPI: bounded calls, the group's communicator, rounds and messages."""
