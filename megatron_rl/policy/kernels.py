"""Reports the kernel libraries that the policy uses.

Megatron-Core 0.16.1 uses Transformer Engine if it is installed, else NVIDIA's apex, else torch or
Megatron's own code. Megatron does not report which library it uses. If an installed Transformer
Engine is not used, this module reports the reason.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import Adam, clip_grads  # pyright: ignore[reportAttributeAccessIssue] (one of three classes)
from megatron.core.tensor_parallel import layers

from megatron_rl.config import LoraSettings

SUPPORTED_VERSIONS = "run bash launch/install_te.sh to install a supported version"
MIN_PACKED_CAPABILITY = (9, 0)
"""Lowest compute capability for which cuDNN supports attention over packed sequences (thd). The
only other kernel for packed sequences in Transformer Engine 2.20.2 comes from flash-attn, which is
not in the lock files (Transformer Engine, attention/dot_product_attention/utils.py,
get_attention_backend).
"""


def uses_transformer_engine(lora: LoraSettings) -> bool:
    """Return True if the language model is built from Transformer Engine's layers.

    Transformer Engine is used only on a GPU, with a working installation, and for a model without
    adapters.
    """
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None and not transformer_engine_error() and not lora.rank


def transformer_engine_error() -> str:
    """Return the reason why the installed Transformer Engine cannot be used, or ''.

    The reason has the form `transformer_engine=VERSION: ...`. The result is '' if Transformer
    Engine can be used or is not installed, or if the machine has no GPU.

    If importing Transformer Engine fails, Megatron treats the package as not installed
    (extensions/transformer_engine.py, lines 61 to 77). If the import succeeds but a module of
    Transformer Engine is missing, importing Megatron itself fails (fp8_utils.py, line 668); the
    command line reports that error (cli/app.py).
    """
    if not torch.cuda.is_available() or find_spec("transformer_engine") is None:
        return ""
    named = f"transformer_engine={installed_version('transformer-engine')}"
    if not HAVE_TE:
        return f"{named}: cannot be imported ({_reason()}), using this project's own layers; {SUPPORTED_VERSIONS}"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_PACKED_CAPABILITY and find_spec("flash_attn") is None:
        lacks = f"has no attention for packed sequences on compute capability {capability[0]}.{capability[1]} without flash-attn"
        return f"{named}: {lacks}, using this project's own layers"
    return ""


def _reason() -> str:
    """Return the first line of the error raised when importing Transformer Engine."""
    try:
        importlib.import_module("transformer_engine.pytorch.fp8")
    except ImportError as error:
        return str(error).partition("\n")[0]
    return "a second import succeeded"


def apex_error() -> str:
    """Return `apex=VERSION: ...` if the installed package apex is not NVIDIA's, else ''."""
    if find_spec("apex") is None or find_spec("apex.optimizers") is not None:
        return ""
    return (
        f"apex={installed_version('apex')}: is a different project with the same name, without apex.optimizers; "
        "pip uninstall apex (docs/kernels.md)"
    )


def describe_kernels(lora: LoraSettings) -> dict[str, str]:
    """Map each kind of kernel to the library that provides it.

    Gradients are accumulated in fp32 by a separate kernel, even if a library with a fused
    accumulation kernel is installed.
    """
    has_te = uses_transformer_engine(lora)
    fused = "transformer_engine" if has_te else "apex" if layers._grad_accum_fusion_available else ""
    return {
        "layers": f"transformer_engine {installed_version('transformer-engine')}" if has_te else "megatron_rl",
        "norm": "transformer_engine" if has_te else "megatron_rl",
        "optimizer": f"{Adam.__name__} of {package_of(Adam)}",
        "clipping": package_of(clip_grads.multi_tensor_applier),
        "gradient accumulation": "megatron" + (f" ({fused}'s fused kernel is installed but not used)" if fused else ""),
    }


def package_of(kernel: object) -> str:
    """Return the top-level package that defines a class or a function."""
    return kernel.__module__.partition(".")[0]


def installed_version(package: str) -> str:
    """Return the version of an installed package, or 'unknown'."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
