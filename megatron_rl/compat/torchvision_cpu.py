"""Makes a CUDA build of torchvision importable with a CPU-only torch; does nothing otherwise.

The package registry provides only CUDA builds of torchvision. With a CPU-only torch, the shared
object of such a build cannot be loaded, and `import torchvision` fails in `_meta_registrations.py`
("operator torchvision::nms does not exist"). Both transformers and vLLM import torchvision. The
transforms used by the image processors of these libraries need no compiled operator, so declaring
two operator schemas is enough.

In every process, `import torch` ends with a call to `declare_operators` (entry point group
"torch.backends", torch 2.13). This module therefore imports nothing at module level, and
`megatron_rl/__init__.py` must remain empty.
"""

_libraries = []


def declare_operators() -> None:
    """Declare the operators nms and qnms if torch is CPU-only and torchvision is a CUDA build."""
    import importlib.util
    from pathlib import Path

    import torch

    if _libraries or torch.version.cuda is not None or torch.version.hip is not None:
        return
    spec = importlib.util.find_spec("torchvision")
    folders = spec.submodule_search_locations if spec is not None else None
    if folders is None or "+cu" not in (Path(folders[0]) / "version.py").read_text():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
