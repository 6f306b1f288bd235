"""Settings that move more bytes per second, found while the program runs."""
