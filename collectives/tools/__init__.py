"""``collectives``: what users run besides their programs.

collectives bench allreduce -np 2 -b 4K -e 64M -f 4
python -m collectives.tools plan -np 8

command      the program: its table of commands, each a module that is imported when it is used
bench        time, bandwidth and correctness of a collective over sizes
demo         a bandwidth table and a data-parallel training on this machine
plan         what would be chosen for a number of ranks
simulate     what collectives and training steps would take on a cluster that one does not have
status       what the ranks of a running job do, and who is late
"""
