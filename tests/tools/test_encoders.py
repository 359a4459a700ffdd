"""Image embeddings of the supported encoders, compared with direct calls of the same networks, and
Lewis rounds generated from them.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.onnx._internal.torchscript_exporter import onnx_proto_utils
from transformers import (
    AutoProcessor,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    Qwen2_5_VLForConditionalGeneration,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from megatron_rl_tools.data.encoders import encode_images
from megatron_rl_tools.data.make_lewis import main
from tests.tools.test_make_lewis import pictures

__all__ = ["pictures"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 32, "patch_size": 8}
Expected = Callable[[torch.Tensor], torch.Tensor]


def vit(folder: Path) -> Expected:
    model = ViTModel(ViTConfig(**SIZES, attn_implementation="eager")).eval()
    model.save_pretrained(folder)
    return lambda pixels: model(pixel_values=pixels).last_hidden_state.mean(1)


def resnet(folder: Path) -> Expected:
    model = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])).eval()
    model.save_pretrained(folder)
    return lambda pixels: model(pixel_values=pixels).last_hidden_state.mean((2, 3))


def clip(folder: Path) -> Expected:
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=SIZES, projection_dim=12)).eval()
    model.save_pretrained(folder)
    return lambda pixels: model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)


def onnx(folder: Path, *, named: str = "pixel_values") -> Expected:
    """Export the ViT as an ONNX file. torch's exporter requires the onnx package only to look for
    custom functions, which this model does not have, so that step is patched.
    """
    expected = vit(folder / "source")

    class Patches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = ViTModel.from_pretrained(folder / "source", attn_implementation="eager").eval()

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.network(pixel_values=pixel_values).last_hidden_state

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(onnx_proto_utils, "_add_onnxscript_fn", lambda model, _functions: model)
        torch.onnx.export(Patches(), (torch.randn(1, 3, 32, 32),), str(folder / "model.onnx"), dynamo=False, input_names=[named])
    return expected


@pytest.mark.parametrize("make", [vit, resnet, clip, onnx])
def test_an_encoder_is_asked_as_its_kind_is(make: Callable[[Path], Expected], tmp_path: Path) -> None:
    """Embeddings of each kind of encoder equal the normalized output of a direct call, to 1e-5."""
    torch.manual_seed(0)
    expected = make(tmp_path)
    (CLIPImageProcessor if make is clip else ViTImageProcessor)(
        size={"height": 32, "width": 32}, do_center_crop=False, image_mean=[0.4] * 3, image_std=[0.2] * 3
    ).save_pretrained(tmp_path)
    shown = [np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8) for seed in range(3)]
    for number, pixels in enumerate(shown):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    rows = encode_images(tmp_path, [tmp_path / f"{number}.png" for number in range(3)])
    prepared = (torch.tensor(np.stack(shown)).permute(0, 3, 1, 2) / 255 - 0.4) / 0.2
    with torch.no_grad():
        wanted = torch.nn.functional.normalize(expected(prepared), dim=1)
    assert rows.dtype == np.float32 and np.abs(wanted[0] - wanted[1]).max() > 1e-3
    np.testing.assert_allclose(rows, wanted.numpy(), atol=1e-5)


def test_the_policys_own_tower_deals_rounds(random_model: Path, pictures: Path, tmp_path: Path) -> None:
    """make_lewis with the policy's checkpoint as encoder uses the mean of the vision tower's
    tokens. Oracle: transformers' vision tower, to 1e-5.
    """
    words = ["--pictures", str(pictures), "--train-share", "0.6", "--queries", "3"]
    assert main([*words, "--out", str(tmp_path / "rounds"), "--encoder", str(random_model)]) == 0
    assert main([*words, "--out", str(tmp_path / "colors")]) == 0
    ours, others = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "speaker").rglob("*.arrow")} for name in ("rounds", "colors")
    )
    assert ours and ours != others, "another encoder, other neighbors"
    path = pictures / "red" / "shade0" / "0.png"
    with Image.open(path) as picture:
        prepared = AutoProcessor.from_pretrained(random_model)(images=[picture.convert("RGB")], text="<|image_pad|>", return_tensors="pt")
    tower = Qwen2_5_VLForConditionalGeneration.from_pretrained(random_model, dtype=torch.float32).eval().model.visual
    with torch.no_grad():
        tokens = tower(prepared["pixel_values"], grid_thw=prepared["image_grid_thw"]).pooler_output
    wanted = torch.nn.functional.normalize(tokens.mean(0), dim=0)
    np.testing.assert_allclose(encode_images(random_model, [path])[0], wanted.numpy(), atol=1e-5)


def test_a_folder_that_is_no_encoder_is_told(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    words = ["--pictures", str(pictures), "--out", str(tmp_path / "out"), "--encoder"]
    assert main([*words, str(tmp_path / "empty")]) == 1
    assert "has no preprocessor_config.json" in capsys.readouterr().err
    (tmp_path / "broken").mkdir()
    ViTImageProcessor().save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "model.onnx").write_bytes(b"no graph")
    assert main([*words, str(tmp_path / "broken")]) == 1
    assert "model.onnx cannot be read" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    ViTImageProcessor().save_pretrained(tmp_path / "other")
    onnx(tmp_path / "other", named="input_ids")
    assert main([*words, str(tmp_path / "other")]) == 1
    assert "has the inputs ['input_ids']" in capsys.readouterr().err
    (tmp_path / "narrow").mkdir()
    onnx(tmp_path / "narrow")
    ViTImageProcessor(size={"height": 48, "width": 48}).save_pretrained(tmp_path / "narrow")
    assert main([*words, str(tmp_path / "narrow")]) == 1
    said = capsys.readouterr().err
    assert "model.onnx failed on pixel_values of shape [1, 3, 48, 48]" in said and "Got: 48 Expected: 32" in said
    assert not (tmp_path / "out").exists()
