"""The catalogue of kernels: problems, configs (a kernel's tunables), legality with reasons, launches, source."""

from .call import Call, call
from .catalogue import FAMILIES, check, configs, default, from_dict, helper_configs
from .config import Config, Launch, to_dict
from .dequant import DequantConfig
from .pack import PackConfig
from .problem import Problem
from .quantize_activations import QuantizeActivationsConfig
from .source import source, source_hash
from .w4a16 import W4A16Config
from .w8a8 import W8A8Config

__all__ = [
    "FAMILIES",
    "Call",
    "Config",
    "DequantConfig",
    "Launch",
    "PackConfig",
    "Problem",
    "QuantizeActivationsConfig",
    "W4A16Config",
    "W8A8Config",
    "call",
    "check",
    "configs",
    "default",
    "from_dict",
    "helper_configs",
    "source",
    "source_hash",
    "to_dict",
]
