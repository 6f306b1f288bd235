"""Predict how long collectives take on a network that one does not have: schedules of thousands of ranks, simulated.

python -m collectives.simulation -np 64 --bytes 100M --latency 5e-6 --bandwidth 12.5e9 --local-size 8

__main__     the command
clock        `simulate`: the schedules of all ranks on a virtual clock
links        the network: latencies, bandwidths, and how messages share links
traffic      the messages of the schedules
"""
