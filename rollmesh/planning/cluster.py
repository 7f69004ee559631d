"""The devices and hosts of a plan: names, memory, and the part of it that no formula counts.

Sizes are what `nvidia-smi` reports as the total of a device, in MiB. The reserve is an assumption: no one can compute
the allocator's fragmentation ahead. So is the host of devices that are not this machine's, and the output marks it as
assumed.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

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
# With CUDA's libraries and context an interpreter holds more; what the system itself needs is in the share.
_HOST_FIXED = 2 * GIB
# Memory of a node for each device. Machines with eight H100, H200 or B200 have 1.7 to 2 TiB, older ones 1 TiB.
_ASSUMED = dict.fromkeys(("H100", "H200", "B200"), 200 * GIB)
_ASSUMED_OF_OTHERS = 128 * GIB
# Each device is placed on its own, so a plan's time and memory grow with their number.
_MOST_PER_NODE, _MOST = 1024, 1 << 16
_TMPFS = Path("/dev/shm")  # noqa: S108 # only measured
_DRIVER = Path("/proc/driver/nvidia/gpus")
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[MGT])(?:i?B)?", re.IGNORECASE)
_UNITS = {"M": MIB, "G": GIB, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Host:
    """Memory of a node, without that of its devices.

    Attributes:
        memory: bytes.
        shm: bytes of its `/dev/shm`; they are part of its memory.
        source: where both are from, in words.
    """

    memory: int
    shm: int
    source: str


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices on equal nodes.

    Attributes:
        name: of the devices.
        per_node: devices of a node; of CPUs, one, which all processes of the node share.
        nodes: number of nodes.
        memory: bytes of a device.
        host: of each node.
    """

    name: str
    per_node: int
    nodes: int
    memory: int
    host: Host

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

    @property
    def process(self) -> int:
        """Bytes of host memory of a process that does nothing yet."""
        return _HOST_FIXED if self.cuda else _CPU_FIXED

    def host_reserve(self, processes: int) -> int:
        """Bytes of a node's memory that are kept free of everything that is computed.

        Args:
            processes: on the node.
        """
        return self.process * processes + round(_CPU_SHARE * self.host.memory)

    def describe_host(self) -> str:
        """The memory of a node, in words."""
        memory = f"{self.host.memory / GIB:.0f} GiB of host memory and " if self.cuda else ""
        return f"{memory}{self.host.shm / GIB:.4g} GiB of /dev/shm per node: {self.host.source}"

    def describe_host_reserve(self) -> str:
        """The reserve of a host, in words."""
        return f"{self.process / GIB:g} GiB per process (interpreter, torch, CUDA's libraries), {_CPU_SHARE:.0%}"

    def describe_reserve(self) -> str:
        """The reserve, in words."""
        if self.cuda:
            return f"{_CUDA_FIXED / GIB:g} GiB per process (context, NCCL, workspaces), {_CUDA_SHARE:.0%} fragmentation"
        return f"{_CPU_FIXED / GIB:g} GiB per process (interpreter, torch), {_CPU_SHARE:.0%} fragmentation"


def size_text(nbytes: int) -> str:
    """Bytes in GiB, fewer than one in MiB."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


def parse_devices(text: str, nodes: int = 1, host_memory: str | None = None, shm: str | None = None) -> Cluster:
    """Reads `8xH100-80G`.

    Args:
        text: count, name and, after a hyphen, GB. The GB of a name that is not known count as GiB.
        nodes: that have as many each.
        host_memory: of a node, as `1T` or `512G`, in binary units; None: this machine's where the devices are its own,
            else an assumption.
        shm: size of its `/dev/shm`; None: likewise.

    Raises:
        ConfigError: not of this form; a name or a size that is not known.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--devices {text!r} is not of the form COUNTxNAME", hint=_HINT)
    count, name = int(found["count"] or 1), found["name"].upper()
    size = int(found["size"]) if found["size"] else None
    if count > _MOST_PER_NODE or count * nodes > _MOST:
        raise ConfigError(
            f"{count * nodes:,} devices are more than are planned", hint=f"up to {_MOST_PER_NODE:,} a node"
        )
    if count < 1 or nodes < 1:
        raise ConfigError(f"--devices {text!r} on {nodes} node(s) has no devices", hint=_HINT)
    here = size is None if name == _CPU else _is_here(name, count)
    if name == _CPU:
        if count > 1:
            raise ConfigError("a node's processes share its memory: it counts as one CPU", hint="write 1xCPU-24G")
        if host_memory is not None:
            raise ConfigError("the memory of a CPU is its host's", hint="write --devices 1xCPU-64G")
        host = _host(here, None if size is None else size * GIB, shm, _ASSUMED_OF_OTHERS)
        return Cluster(_CPU, 1, nodes, host.memory, host)
    given = None if host_memory is None else _parse_size("--host-memory", host_memory)
    host = _host(here, given, shm, count * _ASSUMED.get(name, _ASSUMED_OF_OTHERS))
    known = _SIZES.get(name)
    if known is None:
        if size is None:
            raise ConfigError(f"--devices: {name!r} is not known ({', '.join(_SIZES)}, CPU)", hint=_HINT)
        return Cluster(f"{name}-{size}G", count, nodes, size * GIB, host)
    label, mib = known[0] if size is None else next((pair for pair in known if pair[0] == size), (size, 0))
    if not mib:
        sizes = ", ".join(f"{gb}G" for gb, _ in known)
        raise ConfigError(f"--devices: {name} has {sizes}, not {size}G", hint="name another device, or no size")
    return Cluster(f"{name}-{label}G", count, nodes, mib * MIB, host)


def _host(here: bool, memory: int | None, shm: str | None, assumed: int) -> Host:
    """A node's memory: as given, as this machine has it, or as assumed."""
    given = None if shm is None else _parse_size("--shm", shm)
    if memory is not None and given is not None:
        return Host(memory, given, "as given")
    if here:
        seen = _host_memory() if memory is None else memory
        source = "this machine's" if memory is None and given is None else "this machine's, except the given values"
        return Host(seen, _tmpfs() if given is None else given, source)
    whole = assumed if memory is None else memory
    sources = []
    if memory is None:
        sources.append("the host memory (else --host-memory)")
    if given is None:
        # Linux's default for a tmpfs.
        sources.append("half of it for /dev/shm (else --shm; a container may have 64M)")
    return Host(whole, whole // 2 if given is None else given, f"assumed, {' and '.join(sources)}")


def _parse_size(option: str, text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{option} {text!r} is no size", hint="write 1T, 512G or 64M, in binary units")
    return round(float(found["number"]) * _UNITS[found["unit"].upper()])


def _is_here(name: str, count: int) -> bool:
    """True where this machine has at least this many of the devices; CUDA is not asked."""
    models = [path.read_text(encoding="utf-8").upper() for path in _DRIVER.glob("*/information")]
    whole_name = re.compile(rf"\b{re.escape(name)}\b")
    return sum(whole_name.search(model) is not None for model in models) >= count


def _host_memory() -> int:
    """Bytes of this machine's memory."""
    import psutil

    return int(psutil.virtual_memory().total)


def _tmpfs() -> int:
    """Bytes of this machine's `/dev/shm`; 0 without one."""
    return shutil.disk_usage(_TMPFS).total if _TMPFS.is_dir() else 0
