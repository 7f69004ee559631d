"""The decision whether a command may be forked from a process that was loaded in another environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

# These count after libraries are loaded, or do no harm. NumPy's BLAS and OpenMP read their number of threads as they
# are loaded, and keep the server's single one. Services set that of torch alone (`torch.set_num_threads`). A difference
# in any other variable needs a new interpreter.
_READ_LATE = frozenset(
    {
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "PATH"),
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"),
        *("COLUMNS", "LINES", "TERM", "PWD", "OLDPWD", "SHLVL", "_"),
    }
)
_READ_LATE_PREFIXES = ("ROLLMESH_", "NCCL_", "SLURM_")


def can_fork(command: Sequence[str], environment: Mapping[str, str], loaded: Mapping[str, str]) -> bool:
    """Whether a process that was loaded in one environment can become a command in another.

    Args:
        command: argument list.
        environment: of the command.
        loaded: that of the process.
    """
    if tuple(command[:3]) != (sys.executable, "-P", "-m"):
        return False
    differing = {name for name, _ in environment.items() ^ loaded.items()}
    return all(name in _READ_LATE or name.startswith(_READ_LATE_PREFIXES) for name in differing)
