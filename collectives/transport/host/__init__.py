"""Ranks of one host: the board, windows, mapped tensors, direct reads, and the rings of messages."""
