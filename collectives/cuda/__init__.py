"""What the engine knows about GPUs: devices, kernels, and tensors that live on them. Nothing here imports CuPy before a
GPU is used."""
