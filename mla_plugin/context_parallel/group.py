"""The ranks that share a sequence: a context-parallel group, from what a caller passes or from its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Group:
    """A context-parallel group as this rank sees it.

    Attributes:
        process_group: the process group.
        size: its ranks.
        rank: of this process within the group; all placement and messages use ranks of the group, not global ranks.
    """

    process_group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, cp_group: dist.ProcessGroup | DeviceMesh) -> Group:
        """From a process group or a one-dimensional mesh.

        Raises:
            TypeError: it is neither.
            ValueError: the mesh has several dimensions, or this process is not in the group.
        """
        return cls._of_process_group(process_group_of(cp_group))

    @classmethod
    def named(cls, name: str) -> Group:
        """The group that PyTorch registered under a name; operators take names, not groups."""
        return cls._of_process_group(torch._C._distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type]

    @classmethod
    def supposed(cls, size: int, rank: int) -> Group:
        """A hypothetical group, for requests only; it cannot communicate."""
        return cls(None, size, rank)  # type: ignore[arg-type]

    @classmethod
    def _of_process_group(cls, process_group: dist.ProcessGroup) -> Group:
        group = _groups.get(process_group)
        if group is None:
            rank = dist.get_rank(process_group)
            if rank < 0:
                raise ValueError(_NOT_A_MEMBER)
            group = _groups[process_group] = cls(process_group, dist.get_world_size(process_group), rank)
        return group

    @property
    def name(self) -> str:
        """PyTorch's name of the group; the same on all of its ranks."""
        return str(self.process_group.group_name)


_groups: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()
_NOT_A_MEMBER = "this process is not in cp_group; call attention with the group that holds it, or with cp_group=None"


def process_group_of(cp_group: Any) -> dist.ProcessGroup:
    """The process group of what a caller passes as ``cp_group``; errors as ``Group.of``."""
    if isinstance(cp_group, dist.ProcessGroup):
        return cp_group
    if cp_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NOT_A_MEMBER)
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(cp_group, DeviceMesh):
        raise TypeError(
            f"cp_group is {type(cp_group).__name__}; expected a torch.distributed ProcessGroup, a one-dimensional "
            "DeviceMesh or None"
        )
    if cp_group.ndim != 1:
        names = cp_group.mesh_dim_names or ()
        raise ValueError(
            f"cp_group is a DeviceMesh of {cp_group.ndim} dimensions {names}; expected one, such as mesh['cp']"
        )
    return cp_group.get_group()
