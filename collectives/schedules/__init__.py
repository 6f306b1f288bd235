"""Algorithms as data: rounds of steps over numbered chunks, without a byte, an address or a device. The ring is
`collectives.ring`."""
