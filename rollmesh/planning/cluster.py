"""The devices of a plan: names, memory, and the part of it that no formula counts.

Sizes are what `nvidia-smi` reports as the total of a device, in MiB. The reserve is an assumption: no one can compute
the allocator's fragmentation ahead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rollmesh.mesh.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30

# Name, as it begins -> (GB in the name, MiB of the device); the first of a name is its default.
_SIZES: dict[str, tuple[tuple[int, int], ...]] = {
    "H100": ((80, 81559),),
    "H200": ((141, 143771),),
    "A100": ((80, 81920), (40, 40960)),
    "L40S": ((48, 46068),),
    "4090": ((24, 24564),),
    "B200": ((180, 183359),),
}
_CPU = "CPU"
_FORM = re.compile(r"(?:(?P<count>\d+)x)?(?P<name>[A-Za-z0-9]+)(?:-(?P<size>\d+)G)?", re.IGNORECASE)
_HINT = "write COUNTxNAME or COUNTxNAME-SIZEG, as 8xH100-80G or 1xCPU-24G; a name that is not known needs its size"
# CUDA context, NCCL's channels, cuBLAS's and the kernels' workspaces; then fragmentation of the caching allocator.
_CUDA_FIXED = round(1.5 * GIB)
_CUDA_SHARE = 0.06
# A service's interpreter with torch and transformers (measured: 0.34 GiB); the share is the allocator's.
_CPU_FIXED = round(0.4 * GIB)
_CPU_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices on equal nodes.

    Attributes:
        name: of the devices.
        per_node: devices of a node; of CPUs, one, which all processes of the node share.
        nodes: number of nodes.
        memory: bytes of a device.
    """

    name: str
    per_node: int
    nodes: int
    memory: int

    @property
    def count(self) -> int:
        """Devices in all."""
        return self.per_node * self.nodes

    @property
    def cuda(self) -> bool:
        """True unless the devices are CPUs."""
        return self.name != _CPU

    def reserve(self, processes: int) -> int:
        """Bytes of a device that are kept free of everything that is computed.

        Args:
            processes: that use the device.
        """
        fixed, share = (_CUDA_FIXED, _CUDA_SHARE) if self.cuda else (_CPU_FIXED, _CPU_SHARE)
        return fixed * max(processes, 1) + round(share * self.memory)

    def describe_reserve(self) -> str:
        """The reserve, in words."""
        if self.cuda:
            return f"{_CUDA_FIXED / GIB:g} GiB per process (context, NCCL, workspaces), {_CUDA_SHARE:.0%} fragmentation"
        return f"{_CPU_FIXED / GIB:g} GiB per process (interpreter, torch), {_CPU_SHARE:.0%} fragmentation"


def parse_devices(text: str, nodes: int = 1) -> Cluster:
    """Reads `8xH100-80G`.

    Args:
        text: count, name and, after a hyphen, GB. The GB of a name that is not known count as GiB.
        nodes: that have as many each.

    Raises:
        ConfigError: not of this form; a name or a size that is not known.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--devices {text!r} is not of the form COUNTxNAME", hint=_HINT)
    count, name = int(found["count"] or 1), found["name"].upper()
    size = int(found["size"]) if found["size"] else None
    if count < 1 or nodes < 1:
        raise ConfigError(f"--devices {text!r} on {nodes} node(s) is no device at all", hint=_HINT)
    if name == _CPU:
        if count > 1:
            raise ConfigError("a node's processes share its memory: it counts as one CPU", hint="write 1xCPU-24G")
        return Cluster(_CPU, 1, nodes, _host_memory() if size is None else size * GIB)
    known = _SIZES.get(name)
    if known is None:
        if size is None:
            raise ConfigError(f"--devices: {name!r} is not known ({', '.join(_SIZES)}, CPU)", hint=_HINT)
        return Cluster(f"{name}-{size}G", count, nodes, size * GIB)
    label, mib = known[0] if size is None else next((pair for pair in known if pair[0] == size), (size, 0))
    if not mib:
        sizes = ", ".join(f"{gb}G" for gb, _ in known)
        raise ConfigError(f"--devices: {name} has {sizes}, not {size}G", hint="name another device, or no size")
    return Cluster(f"{name}-{label}G", count, nodes, mib * MIB)


def _host_memory() -> int:
    """Bytes of this machine's memory."""
    import psutil

    return int(psutil.virtual_memory().total)
