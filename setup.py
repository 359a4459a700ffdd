from setuptools import find_packages, setup

setup(
    name="megatron-rl",
    version="0.1.0",
    description="Reinforcement learning of Qwen2.5-VL: Megatron-Core policy, vLLM rollouts, no Ray",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl*", "sandbox*", "tools*", "launch*"]),
    package_data={"megatron_rl.tasks": ["**/*.ttf", "**/*.txt"]},
    entry_points={"torch.backends": ["torchvision_on_cpu = megatron_rl.torchvision_on_cpu:declare_operators"]},
)
