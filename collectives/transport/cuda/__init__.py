"""GPUs: CUDA IPC, NCCL, and the order and the end of the work that they wait for."""
