"""From generated source to PTX, cubin and a loaded kernel."""

from .gpu import load
from .kernel import CompiledKernel, compile_kernel
from .nvrtc import archs, version

__all__ = ["CompiledKernel", "archs", "compile_kernel", "load", "version"]
