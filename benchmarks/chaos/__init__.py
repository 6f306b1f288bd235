"""A kill matrix for elastic jobs: ranks die in every way at every place, and the survivors are checked.

python -m benchmarks.chaos --count 300

deaths      how and where a rank dies, and which deaths a job has
training    what the ranks compute, so that its result can be predicted exactly
frameworks  the same through their distributed optimizers
rank        a rank of a job
job         a job of our launcher: starts it, has its ranks die, ends it
by_hand     a job without a launcher
run         runs a job
judge       what is wrong with what a job has recorded
report      times per row: table and plot
"""
