"""One GPU as this process uses it: the protocol, CuPy's answer to it, and the kernels. Nothing here imports CuPy before
a GPU is used."""
