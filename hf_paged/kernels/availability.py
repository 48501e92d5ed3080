"""Finds out once whether kernels run on a device, before a model relies on them."""

from __future__ import annotations

import importlib.util
import logging
from functools import lru_cache

import numpy as np
import torch

from hf_paged.kernels import cpu_layers
from hf_paged.kernels.layers import LayerKernels
from hf_paged.kernels.philox import DrawGrid
from hf_paged.kernels.transfers import to_device

logger = logging.getLogger(__name__)

HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


def layer_kernels(dtype: torch.dtype, device: torch.device) -> LayerKernels | str:
    """The kernels for what lies between a model's matrix products, or why there are none."""
    if device.type == "cpu":
        return cpu_layers.load(dtype)
    if device.type != "cuda":
        return f"need a CPU, a CUDA or a ROCm device, the model is on {device}"
    if dtype not in HALF_OR_SINGLE:
        return f"compute in float32 and half precision, the model is in {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "need the triton package (pip install hf-paged[gpu]), which is not installed"
    reason = launch_failure(device)
    if reason:
        return reason
    from hf_paged.kernels.triton_layers import TritonLayers

    return TritonLayers(dtype)


@lru_cache
def draw_grid(device: torch.device) -> DrawGrid | str:
    """The order of a GPU's draws, which sampling in one kernel follows; or why that can't be."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"knows how an NVIDIA GPU draws, the model is on {device}"
    if importlib.util.find_spec("triton") is None:
        return "needs the triton package (pip install hf-paged[gpu]), which is not installed"
    reason = launch_failure(device)
    if reason:
        return reason
    from hf_paged.kernels.row_sampling import draws_agree

    grid = DrawGrid.of(device)
    if draws_agree(grid, device):
        return grid
    reason = f"draws otherwise than torch {torch.__version__} on this device"
    logger.warning("hf_paged: the kernel that chooses tokens %s: torch chooses them, which is slower", reason)
    return reason


@lru_cache
def launch_failure(device: torch.device) -> str | None:
    """Why not even a small kernel runs there: Triton needs a C compiler and Python's headers to launch any."""
    try:
        from hf_paged.kernels import ops

        with torch.inference_mode(False):
            blocks = torch.arange(2.0, device=device)[:, None].expand(2, 16).reshape(2, 1, 1, 1, 1, 16).clone()
            ops.copy_blocks(blocks, *to_device(np.array([[1], [0]]), device))
            return None if bool((blocks == 1).all()) else "copies wrongly on this device"
    except torch.OutOfMemoryError:  # says nothing about Triton, and must not be remembered as if it did
        raise
    except Exception as error:
        # Once a process: a GPU without the kernels works and is slow, which is hard to trace to this.
        reason = f"can't compile or launch kernels here ({type(error).__name__}: {error})"
        logger.warning("hf_paged: the Triton backend %s", reason)
        return reason
