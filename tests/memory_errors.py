"""The errors of libraries when memory runs out."""

import torch

OUT_OF_MEMORY: dict[str, Exception] = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "host": MemoryError(),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't"),
    "driver": torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaError`"),
    "cublas": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
    "nccl": torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 2 'out of memory'"
    ),
    "nccl buffer": torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, Last error:\nFailed to CUDA calloc async 608 bytes"
    ),
    "triton": RuntimeError("Triton Error [CUDA]: out of memory"),
}
"""An error of each library, of a CPU and of GPUs."""
