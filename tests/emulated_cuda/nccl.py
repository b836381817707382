"""Put the stand-in for ProcessGroupNCCL where torch.distributed looks for it."""

from __future__ import annotations

import sys
from typing import Any


def adopt() -> None:
    """Let `init_process_group("nccl")`, and groups of `cpu:gloo,cuda:nccl`, make groups of the emulated NCCL."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    import emulated_nccl
    from torch.distributed import distributed_c10d

    class Meta(type):
        def __call__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            of_gloo = dist.ProcessGroupGloo._Options()
            interface = "lo0" if sys.platform == "darwin" else "lo"
            of_gloo._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
            of_gloo._timeout = options._timeout
            gloo = dist.ProcessGroupGloo(dist.PrefixStore("emulated_nccl", store), rank, size, of_gloo)
            return emulated_nccl.Group(gloo, options)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, emulated_nccl.Group)

    class ProcessGroupNCCL(metaclass=Meta):
        Options = emulated_nccl.Options

        class NCCLConfig:
            pass

    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
