"""Predict how long collectives and training steps take on a cluster that one does not have: ``collectives simulate``.

clock        `simulate`: the schedules of all ranks on a virtual clock, message by message
traffic      the messages of the schedules
links        the network: latencies, bandwidths, and how messages share links
rounds       the same by kinds of rounds, for 65,536 ranks
nccl         NCCL's own collectives, by its published model
topology     clusters: published ones, and those read from files
prediction   what the planner would choose on a cluster, and its time
steps        a training step: fusion, overlap, stragglers; what would help most
gradients    those of a model or a timeline
page         a step as an HTML page
chakra       schedules as Chakra execution traces
"""
