"""Whose kernels the policy runs on, and why Transformer Engine's are not among them though it is installed.

Megatron-core 0.16.1 takes what it finds, silently: Transformer Engine, else NVIDIA's apex, else torch or code of its own.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import Adam, clip_grads
from megatron.core.tensor_parallel import layers

from megatron_rl.config import LoraSettings

SUPPORTED_VERSIONS = "bash launch/install_te.sh installs the version that fits"
MIN_PACKED_CAPABILITY = (9, 0)
"""The compute capability from which cuDNN attends to packed sequences (thd); Transformer Engine 2.20.2 has no other kernel for them but
flash-attn's, which is in no lock of ours (reference: its attention/dot_product_attention/utils.py, get_attention_backend)."""


def uses_transformer_engine(lora: LoraSettings) -> bool:
    """Whether the language model's layers are Transformer Engine's: it works, has a GPU to run on, and no adapters to carry."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None and not transformer_engine_error() and not lora.rank


def transformer_engine_error() -> str:
    """`transformer_engine=VERSION: ...` where it is installed beside a GPU and our own layers run all the same; else ''.

    Megatron takes one that does not load for none (extensions/transformer_engine.py, 61 to 77). Beside one that loads and lacks a module it
    does not load itself (fp8_utils.py, 668), which the door tells of.
    """
    if not torch.cuda.is_available() or find_spec("transformer_engine") is None:
        return ""
    named = f"transformer_engine={installed_version('transformer-engine')}"
    if not HAVE_TE:
        return f"{named}: does not load ({_reason()}), and our own layers run; {SUPPORTED_VERSIONS}"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_PACKED_CAPABILITY and find_spec("flash_attn") is None:
        lacks = f"has no attention for packed sequences on compute capability {capability[0]}.{capability[1]} without flash-attn"
        return f"{named}: {lacks}, and our own layers run"
    return ""


def _reason() -> str:
    """What importing it says."""
    try:
        importlib.import_module("transformer_engine.pytorch.fp8")
    except ImportError as error:
        return str(error).partition("\n")[0]
    return "at the second try it does"


def apex_error() -> str:
    """`apex=VERSION: ...` where a package of that name is installed that is not NVIDIA's."""
    if find_spec("apex") is None or find_spec("apex.optimizers") is not None:
        return ""
    return (
        f"apex={installed_version('apex')}: is another project of that name, without apex.optimizers; pip uninstall apex (docs/kernels.md)"
    )


def describe_kernels(lora: LoraSettings) -> dict[str, str]:
    """What runs, and from where. Gradients are added in fp32 by a kernel of their own even where a fused one is there."""
    has_te = uses_transformer_engine(lora)
    fused = "transformer_engine" if has_te else "apex" if layers._grad_accum_fusion_available else ""
    return {
        "layers": f"transformer_engine {installed_version('transformer-engine')}" if has_te else "megatron_rl",
        "norm": "transformer_engine" if has_te else "megatron_rl",
        "optimizer": f"{Adam.__name__} of {package_of(Adam)}",
        "clipping": package_of(clip_grads.multi_tensor_applier),
        "gradient accumulation": "megatron" + (f" ({fused}'s fused one is there, and off)" if fused else ""),
    }


def package_of(kernel: object) -> str:
    """The package that a class or a function is from."""
    return kernel.__module__.partition(".")[0]


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
