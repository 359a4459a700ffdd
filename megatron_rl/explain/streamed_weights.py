"""Hugging Face's model with weights that are loaded only for the forward pass of each module.

The weights that are used first are cached, up to `cache_bytes`. A small model is therefore read
only once, and a large model takes little more memory than `cache_bytes`. The cache does not change
the results.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn
from transformers import PreTrainedModel

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import canonical_name, to_transformers_form
from megatron_rl.weights.formats.checkpoint_source import TensorSource


class StreamedModel:
    """Float32 model with weights streamed from a source."""

    def __init__(self, spec: ModelSpec, source: TensorSource, *, cache_bytes: int, device: torch.device) -> None:
        self._source, self._cache_bytes_left, self._device = source, cache_bytes, device
        self._cached: dict[str, torch.Tensor] = {}
        self._overrides: dict[str, TensorSource] = {}
        """Maps the name of a tensor to the source that overrides it."""
        config = deepcopy(spec.config)
        config.dtype = torch.float32
        with torch.device("meta"):
            self.model = spec.family.model_class(config).float().eval()
        _fill_buffers(self.model, device)
        names = {parameter: canonical_name(name) for name, parameter in self.model.named_parameters()}
        self.names: Sequence[str] = tuple(names.values())
        for module in self.model.modules():
            # A gated delta net reads the weight of its convolution without calling the convolution.
            owners = [module, *(child for child in module.children() if isinstance(child, nn.Conv1d))]
            own = [(owner, key, names[blank], blank) for owner in owners for key, blank in owner.named_parameters(recurse=False)]
            if own:
                self._stream_module(module, own)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as float32 on the device, in the form of released checkpoints."""
        if name in self._overrides:
            return self._overrides[name].read(name).to(self._device, torch.float32)
        if name in self._cached:
            return self._cached[name]
        tensor = self._source.read(name).to(self._device, torch.float32)
        if tensor.nbytes <= self._cache_bytes_left:
            self._cache_bytes_left -= tensor.nbytes
            self._cached[name] = tensor
        return tensor

    @contextmanager
    def override_tensors(self, names: Sequence[str], source: TensorSource) -> Iterator[None]:
        """Use the tensors with these names from another source within the with block."""
        self._overrides = dict.fromkeys(names, source)
        try:
            yield
        finally:
            self._overrides = {}

    def _stream_module(self, module: nn.Module, own: Sequence[tuple[nn.Module, str, str, nn.Parameter]]) -> None:
        """Register hooks of a module that load and free parameters.

        `own` contains, for each parameter, its module, its name in this module, the canonical name
        of the tensor and a placeholder parameter without data.
        """

        def come(_module: nn.Module, _: tuple) -> None:
            for owner, key, name, blank in own:
                setattr(owner, key, nn.Parameter(to_transformers_form(name, self.get_tensor(name), blank.shape), requires_grad=False))

        def go(_module: nn.Module, _: tuple, __: object) -> None:
            for owner, key, _name, blank in own:
                setattr(owner, key, blank)

        module.register_forward_pre_hook(come)
        module.register_forward_hook(go, always_call=True)


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Fill the buffers for rotary angles, which checkpoints do not contain.

    The values are computed as in from_pretrained of transformers (5.19, modeling_utils.py).
    """
    for module in model.modules():
        blanks = dict(module.named_buffers(recurse=False))
        for name, blank in blanks.items():
            setattr(module, name, torch.empty(blank.shape, dtype=blank.dtype, device=device))
        if blanks:
            model._init_weights(module)
