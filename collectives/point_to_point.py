"""Point-to-point messages, as users call them: from one rank to another, matched by source and tag.

Messages from one rank to another with the same tag are received in the order in which they were sent. They are no
operations of all ranks: they may be mixed freely with collectives, also with those in flight, and come from several
threads. Tensors on GPUs pass through host memory.

`send` and `recv` document the arguments and the errors that all functions share.
"""

from __future__ import annotations

from collectives.api import of_default
from collectives.worlds.messages import Messages

send = of_default(Messages.send)
isend = of_default(Messages.isend)
recv = of_default(Messages.recv)
irecv = of_default(Messages.irecv)
sendrecv = of_default(Messages.sendrecv)
