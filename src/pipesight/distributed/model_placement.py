"""Which rank has which parameter of a model: the owner trains and saves it, other users have a copy.

A parameter belongs to the first partition that uses it. That is known from a dry run; before the first one, it is
guessed by the order in which the model registers its modules. A partition that uses a parameter of another rank, as
tied weights are, gets a copy: its value comes from the owner before each step, its gradient goes back after it. So the
parameter is counted, trained and saved once, and a wrong guess costs time alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipesight.distributed.mesh import PipelineMesh
from pipesight.distributed.stand_ins import META

__all__ = ["Placement", "named_tree"]


class Placement:
    """The parameters and buffers of a model on one rank.

    The parameters of the ``module`` are replaced by those of this rank, and by some without memory. ``parts`` are the
    partitions that use each, by name, the owner's first.
    """

    def __init__(
        self, module: nn.Module, parts: Mapping[str, Sequence[int]], rank_of: Callable[[int], int], mesh: PipelineMesh
    ) -> None:
        self._module, self._rank_of, self._mesh = module, rank_of, mesh
        self.aliases: dict[str, list[str]] = {}
        """All names of each parameter, by its first."""
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        first: dict[int, str] = {}
        for prefix, child in module.named_modules(remove_duplicate=False):
            for key, parameter in child._parameters.items():
                if parameter is not None:
                    full = f"{prefix}.{key}" if prefix else key
                    name = first.setdefault(id(parameter), full)
                    self.aliases.setdefault(name, []).append(full)
                    self._places.setdefault(name, []).append((child, key))
        self.owner = {name: rank_of(parts[name][0]) for name in self._places}
        """Which rank of the pipeline has each parameter, by its first name."""
        self.users = {name: {rank_of(j) for j in parts[name]} for name in self._places}
        """Those that use it, the owner among them."""
        self._links = self._find_links()

    def tensor(self, name: str) -> nn.Parameter:
        """Return a parameter, that of this rank, its copy, or one without memory."""
        child, key = self._places[name][0]
        found = child._parameters[key]
        assert found is not None
        return found

    def put(self, name: str, parameter: nn.Parameter) -> None:
        """Set a parameter, under all its names."""
        for child, key in self._places[name]:
            child._parameters[key] = parameter

    def hold(self) -> None:
        """Move the parameters of this rank to its device, and free those that it does not use."""
        for name in self._places:
            self._hold(name)

    def _hold(self, name: str) -> None:
        parameter, device = self.tensor(name), self._mesh.device
        mine = self._mesh.position in self.users[name]
        if mine and parameter.is_meta:
            empty = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device=device)
            self.put(name, nn.Parameter(empty, parameter.requires_grad))
        elif mine and parameter.device != device:
            self.put(name, nn.Parameter(parameter.detach().to(device), parameter.requires_grad))
        elif not mine and not parameter.is_meta:
            empty = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device=META)
            self.put(name, nn.Parameter(empty, parameter.requires_grad))

    def adjust(self, used: Sequence[Iterable[str]]) -> list[str]:
        """Give copies to partitions that turn out to use a parameter of another rank; return which are new."""
        return self.add_copies([(name, self._rank_of(j)) for j, names in enumerate(used) for name in sorted(names)])

    def add_copies(self, users: Iterable[tuple[str, int]]) -> list[str]:
        """Give copies to ranks that use parameters of others; return the names of those that are new."""
        new = []
        for name, rank in users:
            if rank not in self.users[name]:
                self.users[name].add(rank)
                new.append(name)
                if rank == self._mesh.position:
                    self._hold(name)
        if new:
            self._links = self._find_links()
        return new

    @property
    def copies(self) -> list[tuple[str, int]]:
        """The parameters with copies, and the ranks of the pipeline that have them."""
        return [(name, k) for name, ranks in self.users.items() for k in sorted(ranks) if k != self.owner[name]]

    @property
    def owned(self) -> list[str]:
        """The parameters that this rank trains and saves."""
        return [name for name in self._places if self.owner[name] == self._mesh.position]

    @property
    def held(self) -> list[nn.Parameter]:
        """All parameters with memory on this rank, copies included."""
        return [self.tensor(name) for name in self._places if self._mesh.position in self.users[name]]

    # Copies.

    def _find_links(self) -> list[tuple[str, int]]:
        """Return parameters with copies, and a rank with one; those that concern this rank, in one order for all."""
        me = self._mesh.position
        return [
            (name, rank)
            for name in self._places
            for rank in sorted(self.users[name])
            if rank != self.owner[name] and me in (rank, self.owner[name])
        ]

    def send_values(self) -> None:
        """Bring copies up to date."""
        links, me = self._links, self._mesh.position
        tensors = [self.tensor(name).detach() for name, _ in links]
        received = [
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if rank == me else t.contiguous()
            for t, (_, rank) in zip(tensors, links, strict=False)
        ]
        self._exchange([(self.owner[name], rank, t) for (name, rank), t in zip(links, received, strict=True)])
        with torch.no_grad():
            for (_, rank), mine, theirs in zip(links, tensors, received, strict=True):
                if rank == me:
                    mine.copy_(theirs)

    def collect_gradients(self) -> None:
        """Add the gradients of copies to those of their owners, and clear them."""
        me = self._mesh.position
        links = [(name, rank) for name, rank in self._links if self.tensor(name).requires_grad]
        buffers = []
        for name, rank in links:
            parameter = self.tensor(name)
            flat = torch.empty(parameter.numel() + 1, dtype=parameter.dtype, device=self._mesh.device)
            if rank == me:  # the last number tells whether there is one
                gradient, parameter.grad = parameter.grad, None
                there = 0.0 if gradient is None else 1.0
                flat[-1] = there
                flat[:-1] = 0 if gradient is None else gradient.to_dense().reshape(-1)
            buffers.append(flat)
        self._exchange([(rank, self.owner[name], t) for (name, rank), t in zip(links, buffers, strict=True)])
        for (name, rank), flat in zip(links, buffers, strict=True):
            parameter = self.tensor(name)
            if rank != me and flat[-1].item():
                gradient = flat[:-1].view(parameter.shape)
                parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient

    def _exchange(self, transfers: Sequence[tuple[int, int, Tensor]]) -> None:
        """Send and receive tensors, given as source, target and tensor."""
        me, group = self._mesh.position, self._mesh.pipeline_group
        ops = []
        for source, target, tensor in transfers:
            if tensor.numel():
                content = tensor.view(-1).view(torch.uint8)  # every dtype can be sent so
                way, peer = (dist.isend, target) if source == me else (dist.irecv, source)
                ops.append(dist.P2POp(way, content, group=group, group_peer=peer))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


def named_tree(
    tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], modules: Mapping[str, nn.Module]
) -> nn.Module:
    """Return a module in which parameters, buffers and modules have the given names.

    >>> list(named_tree({"a.b": nn.Parameter(torch.ones(1))}, {}, {}).state_dict())
    ['a.b']
    """
    root = nn.Module()
    for name, module in modules.items():
        _home(root, name)._modules[name.rpartition(".")[2]] = module
    for table, named in (("_parameters", tensors), ("_buffers", buffers)):
        for name, tensor in named.items():
            values: dict[str, Any] = getattr(_home(root, name), table)
            values[name.rpartition(".")[2]] = tensor
    return root


def _home(root: nn.Module, name: str) -> nn.Module:
    for part in name.split(".")[:-1]:
        if part not in root._modules:
            root._modules[part] = nn.Module()
        child = root._modules[part]
        assert child is not None
        root = child
    return root
