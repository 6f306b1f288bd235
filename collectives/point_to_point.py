"""Point-to-point messages, as users call them: from one rank to another, matched by source and tag.

Messages between the same two ranks with the same tag arrive in the order in which they were sent. Only the two ranks
take part, so messages may be mixed freely with collectives, including collectives in flight, and sent from several
threads. GPU tensors pass through host memory.

`send` and `recv` document the arguments and errors that all functions share.
"""

from __future__ import annotations

from collectives.api import of_default
from collectives.worlds.messages import Messages

send = of_default(Messages.send)
isend = of_default(Messages.isend)
recv = of_default(Messages.recv)
irecv = of_default(Messages.irecv)
sendrecv = of_default(Messages.sendrecv)
