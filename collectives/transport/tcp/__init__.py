"""Processes connected by TCP: proved connections, beats and notices, rounds and messages."""
