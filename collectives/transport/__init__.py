"""Transports move blocks of bytes between ranks; `base` holds the protocol, each other module one way to do it."""
