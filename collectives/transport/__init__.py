"""Transports move blocks of bytes between ranks; `base` defines the protocols, the other modules implement them."""
