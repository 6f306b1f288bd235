"""Schedules: what each rank does in a collective, as rounds of steps over numbered chunks; and the four steps.

from collectives.schedules import copy, receive, reduce, send
"""

from collectives.schedules.mscclpp import from_mscclpp as from_mscclpp
from collectives.schedules.schedule import copy as copy
from collectives.schedules.schedule import receive as receive
from collectives.schedules.schedule import reduce as reduce
from collectives.schedules.schedule import send as send
