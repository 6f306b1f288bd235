"""The parts of plan and engine that only operations on GPU tensors need. CuPy is not imported before a GPU is used."""
