# %% [markdown]
"""# Inspect the rollouts of a run.

Reads the recorded rollouts of examples/own_reward.py with pandas. The file is a notebook in percent
format: VS Code, PyCharm, Spyder and jupytext open it as cells. It also runs as a script:

    python examples/inspect_rollouts.py
    python examples/inspect_rollouts.py runs/OTHER

The run needs `rollouts.save=all`. Expect two tables and RUN/rollouts.png.
"""

# %%
import sys
from pathlib import Path

import matplotlib as mpl

if "ipykernel" not in sys.modules:
    mpl.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from PIL import Image

RUN = Path(sys.argv[1] if sys.argv[1:] and "ipykernel" not in sys.modules else "runs/examples/own_reward")
files = sorted((RUN / "rollouts").glob("step_*.parquet"))
if not files:
    sys.exit(f"error: {RUN}/rollouts: no recorded rollouts; examples/own_reward.py records some")

# %% [markdown]
# One row per rollout. Only the named columns are read from the files.

# %%
columns = ["step", "example_id", "reward", "num_turns", "num_sampled", "stop_reason", "responses", "turns", "sequences"]
rollouts = pd.concat([pd.read_parquet(file, columns=columns) for file in files], ignore_index=True)
by_step = rollouts.groupby("step").agg(rollouts=("reward", "size"), reward=("reward", "mean"), turns=("num_turns", "mean"))
print(by_step.round(3).to_string())

# %% [markdown]
# The examples with the lowest mean reward in the last quarter of the run.

# %%
late = rollouts[rollouts["step"] >= rollouts["step"].max() * 3 // 4]
hardest = late.groupby("example_id").agg(reward=("reward", "mean"), rollouts=("reward", "size")).sort_values("reward").head(5)
print(hardest.round(3).to_string())

# %% [markdown]
# The worst rollout of the last step: its first image, its responses, and its least likely token.

# %%
worst = rollouts[rollouts["step"] == rollouts["step"].max()].sort_values("reward").iloc[0]
first = worst["sequences"][0]
image = Image.open(RUN / "rollouts" / "images" / f"{first['images'][0]}.png")
sampled = [logprob for logprob, mask in zip(first["rollout_logprobs"], first["loss_mask"], strict=True) if mask]
print(f"worst rollout of step {worst['step']}: {worst['example_id']}, reward {worst['reward']:.3f}, {worst['stop_reason']}")
print(worst["responses"])
print(f"least likely token of the first response: logprob {min(sampled):.2f}")

# %%
figure, (curve, shown) = plt.subplots(1, 2, figsize=(8, 3))
curve.plot(by_step.index, by_step["reward"])
curve.set(xlabel="step", ylabel="mean reward")
shown.imshow(image)
shown.set_title(f"{worst['example_id']}: {worst['reward']:.2f}")
shown.axis("off")
figure.tight_layout()
figure.savefig(RUN / "rollouts.png", dpi=70)
print(RUN / "rollouts.png")
