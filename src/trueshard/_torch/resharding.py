"""Resharding after forward to fewer ranks than share a parameter, each of which then keeps a larger part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import Shard

from trueshard._torch.fsdp import ShardedModule, _groups
from trueshard._torch.modules import limit_alike
from trueshard._torch.simulating import real_tensors


def set_reshard_after_forward(module: ShardedModule, policy: bool | int, meshes: dict[Any, DeviceMesh]) -> None:
    """``FSDPModule.set_reshard_after_forward``, for one unit, that also takes a node size.

    The public setter refuses integers, and ``fully_shard(reshard_after_forward=int)`` makes new process groups for
    each unit. ``meshes`` is the caller's table of the smaller meshes, so that a size makes its groups once.
    """
    if isinstance(policy, bool):
        module.set_reshard_after_forward(policy, recurse=False)
        return
    module._get_fsdp_state()._auto_reshard_after_forward = False
    for group in _groups(module):
        mesh = group.mesh_info.mesh
        if (mesh, policy) not in meshes:
            with real_tensors():
                ranks = mesh.mesh.view(-1, policy)
                meshes[mesh, policy] = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("replicate", "shard"))
                limit_alike(meshes[mesh, policy])
        info = HSDPMeshInfo(meshes[mesh, policy], shard_mesh_dim=1, replicate_mesh_dim=0)
        group.post_forward_mesh_info = info
        for parameter in group.fsdp_params:
            parameter.post_forward_mesh_info = info
            if parameter.fsdp_placement.dim:
                parameter.__class__ = _CutInside
            unsharded = torch.empty(parameter._orig_size, device="meta")
            parameter._init_sharded_post_forward_param_metadata(unsharded)


class _CutInside(FSDPParam):
    """A parameter that is not cut by rows, where ranks of a smaller group keep a part each between its passes.

    FSDP2 cuts the gathered memory itself for that, whatever the dimension, so what comes back from the smaller group
    is whole; but it would join it as parts along the dimension of the shards.
    """

    @property
    def fsdp_placement(self) -> Any:  # type: ignore[override]
        kept = self.sharded_state == ShardedState.SHARDED_POST_FORWARD
        return Shard(0) if kept else self.__dict__["fsdp_placement"]

    def _init_sharded_post_forward_param_metadata(self, param: torch.Tensor) -> None:
        assert self.post_forward_mesh_info is not None
        # Rows may be fewer than these ranks: nobody reads it but as memory.
        self.sharded_post_forward_size = torch.Size([param.numel() // self.post_forward_mesh_info.shard_mesh_size])
        self.contiguous_sharded_post_forward_stride = (1,)
