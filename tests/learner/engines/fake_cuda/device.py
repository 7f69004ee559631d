"""A process in which FakeTensors live on `cuda:0`: shapes, dtypes and devices are right, values there are none.

`load` comes before anything imports torch, `install` after it. `torch.cuda.is_available` stays False: that keeps
FakeTensorMode from initializing a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")


def build(folder: Path) -> Path:
    """Compiles the device against the torch that is installed, if the folder has none of it; takes two seconds."""
    import torch

    root = Path(torch.__file__).parent
    include, lib = root / "include", root / "lib"
    options = ["-shared", "-fPIC", "-O0", "-std=c++20", f"-I{include}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
    made_of = repr((options, torch.__version__, SOURCE.read_bytes()))
    library = folder / f"fake_cuda-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        unfinished = folder / f"{os.getpid()}.so"
        subprocess.run(["c++", *options, SOURCE, "-o", unfinished, "-lc10", "-ltorch_cpu"], check=True)
        unfinished.rename(library)
    return library


def load(library: Path) -> None:
    """Loads the device; torch, imported later, resolves to what it defines."""
    assert "torch" not in sys.modules
    sys.setdlopenflags(sys.getdlopenflags() | os.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL)


def install(library: Path) -> None:
    """Makes the device known to torch, and gives `torch.cuda` what FSDP2 and the engine ask of it."""
    import torch

    ctypes.CDLL(str(library)).install()
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.Stream, cuda.Event, torch.Event = _Stream, _Event, _Event
    cuda.current_device, cuda.device_count = lambda: 0, lambda: 1
    cuda.current_stream = lambda *_: stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    # One function each: torch's compiler keeps a table of them.
    cuda.set_device = lambda *_: None
    cuda.synchronize = lambda *_: None
    cuda.get_device_capability = lambda *_: (9, 0)
    # A FakeTensor has nothing that could be pinned.
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.nn.Module._apply = _replace_tensors


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> _Event:
        return self

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Stream:
    device = "cuda:0"

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...


def _replace_tensors(self: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    """`Module._apply`, which would swap a parameter's memory: a FakeTensor has none, so parameters are replaced."""
    import torch

    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                moved = function(parameter)
            if moved is not parameter:
                module._parameters[name] = torch.nn.Parameter(moved, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
    return self
