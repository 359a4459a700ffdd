"""Lets the registry's CUDA-linked torchvision sit beside a CPU-only torch; does nothing anywhere else.

The package registry carries only CUDA builds of torchvision. Beside a CPU-only torch its shared object cannot be loaded, and
`import torchvision` dies in `_meta_registrations.py` ("operator torchvision::nms does not exist"), although the transforms that image
processors use need no compiled operator: declaring two operator schemas is enough. transformers and vLLM both import torchvision.

torch calls `declare_operators` at the end of `import torch`, in every process (entry point group "torch.backends", torch 2.13), so this
module imports nothing at its top and `megatron_rl/__init__.py` stays empty.
"""

_libraries = []


def declare_operators() -> None:
    """Declare the schemas of torchvision's nms and qnms if torch has no accelerator build and torchvision is a CUDA build."""
    import importlib.util
    from pathlib import Path

    import torch

    if _libraries or torch.version.cuda is not None or torch.version.hip is not None:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or "+cu" not in (Path(spec.submodule_search_locations[0]) / "version.py").read_text():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
