"""Image encoders for tools/data/make_lewis.py.

The folder of an encoder contains the configuration of its image processor and either a transformers
model or an ONNX file.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from megatron_rl.config import require
from megatron_rl_tools.data.lewis_rounds import normalize_rows, open_image

ONNX = "model.onnx"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def encode_images(folder: Path, paths: list[Path]) -> np.ndarray:
    """Return one embedding per image, as float32 [N, D] with each row normalized to length 1.

    Raises:
        ValueError: The folder has no usable image encoder.
    """
    from transformers import AutoImageProcessor

    is_there = any((folder / name).exists() for name in PROCESSOR_FILES)
    require(is_there, "--encoder", folder, f"has no {PROCESSOR_FILES[0]}, which configures image preprocessing; use a transformers folder")
    processor = AutoImageProcessor.from_pretrained(folder)
    encode = _load_onnx_encoder(folder / ONNX) if (folder / ONNX).exists() else _load_transformers_encoder(folder)
    rows = [encode(dict(processor(images=[open_image(path)], return_tensors="pt"))) for path in paths]
    return normalize_rows(np.stack(rows).astype(np.float32))


def _load_onnx_encoder(file: Path) -> Callable[[dict], np.ndarray]:
    """Load an ONNX encoder.

    The graph must have a single input, pixel_values. The first output of the graph is either one
    embedding per image or one embedding per patch. The graph is run with onnxruntime, because
    OpenCV 5.0 truncates mismatched shapes (NaryEltwiseLayer: "Clamping to 17"), whereas onnxruntime
    raises an error.
    """
    is_there = find_spec("onnxruntime") is not None
    require(is_there, "--encoder", file.parent, f"{file.name} requires onnxruntime: pip install onnxruntime==1.32.0")
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, InvalidProtobuf, RuntimeException

    said = (Fail, InvalidArgument, InvalidGraph, InvalidProtobuf, RuntimeException)
    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except said as error:
        raise ValueError(f"--encoder={file.parent}: {file.name} cannot be read ({error})") from error
    inputs = [each.name for each in session.get_inputs()]
    require(
        inputs == ["pixel_values"], "--encoder", file.parent, f"{file.name} has the inputs {inputs}; pixel_values must be the only input"
    )

    def encode(prepared: dict) -> np.ndarray:
        try:
            return _mean_embedding(session.run(None, {"pixel_values": prepared["pixel_values"].numpy()})[0][0])
        except said as error:
            shape = list(prepared["pixel_values"].shape)
            raise ValueError(f"--encoder={file.parent}: {file.name} failed on pixel_values of shape {shape} ({error})") from error

    return encode


def _load_transformers_encoder(folder: Path) -> Callable[[dict], np.ndarray]:
    """Load a transformers encoder.

    The last hidden state is used for models with image input only (ViT, ResNet), and
    `get_image_features` for models with image and text input (CLIP, Qwen-VL).
    """
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    is_of_pictures = model.main_input_name == "pixel_values"

    @torch.no_grad()
    def encode(prepared: dict) -> np.ndarray:
        if is_of_pictures:
            return _mean_embedding(model(**prepared).last_hidden_state[0].numpy())
        pooled = model.get_image_features(**prepared).pooler_output
        return _mean_embedding(pooled[0].numpy())

    return encode


def _mean_embedding(features: np.ndarray) -> np.ndarray:
    """Return the mean [D] of features with shape [D], [patches, D] or [D, rows, columns]."""
    match features.ndim:
        case 1:
            return features
        case 2:
            return features.mean(0)
        case _:
            return features.mean((1, 2))
