"""What torch says of itself and of the devices it sees, printed as JSON by a process of its own."""

from __future__ import annotations

import json
import warnings
from typing import Any


def facts() -> dict[str, Any]:
    """Versions, backends and devices. Memory in bytes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        import torch.distributed as dist

        gpus = [_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        nccl = dist.is_available() and dist.is_nccl_available()
        return {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl and gpus else None,
            "accelerator": None if here is None else here.type,
            "gpus": gpus,
            "said": [str(each.message) for each in caught if issubclass(each.category, (UserWarning, RuntimeWarning))],
        }


def _gpu(properties: Any) -> dict[str, Any]:
    return {"name": properties.name, "memory": properties.total_memory, "bf16": properties.major >= 8}


def main() -> None:
    """Print `facts()`, as the last line of the output."""
    print(json.dumps(facts()))
