"""The only package that uses PyTorch's private names.

Each function says why nothing public serves. ``tests/test_torch_private.py`` calls every one of them, so a release of
torch that moves one of these names fails there, by name, and not in a user's run. Supported: torch 2.11 to 2.15.

Each file uses the private names of one part of torch. Others call ``_torch.local(tensor)`` and the like.
"""

# ruff: noqa: F403 (what the files define without an underscore is what the package offers)

from __future__ import annotations

from trueshard._torch.capabilities import *
from trueshard._torch.fake_mode import *
from trueshard._torch.fsdp import *
from trueshard._torch.modules import *
from trueshard._torch.operators import *
from trueshard._torch.patches import *
from trueshard._torch.reductions import *
from trueshard._torch.resharding import *
from trueshard._torch.ring import *
from trueshard._torch.rows import *
from trueshard._torch.simulating import *
from trueshard._torch.tensors import *
from trueshard._torch.thread_ranks import *
