"""Runs benchmarks/trl_side.py without TRL and datasets installed: implements the parts of both that
the script uses, without any training.

The fake trainer tokenizes messages with the processor's chat template, as TRL does, and passes each
prompt's group to the reward function: half of the responses take the optimal step, the others are
not JSON. The rows of the dataset are written to the path of --out with `.rows` appended.
"""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from transformers import PrinterCallback

from megatron_rl.tasks.gym_cards.number_line import optimal_action
from megatron_rl.tasks.gym_cards.task import write_reply

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "trl_side.py"


class Dataset:
    def __init__(self, rows: dict[str, list]) -> None:
        self.rows, self.show = rows, lambda rows: rows

    @classmethod
    def from_dict(cls, rows: dict[str, list]) -> "Dataset":
        return cls(rows)

    def with_transform(self, transform: Callable[[dict[str, list]], dict[str, list]]) -> "Dataset":
        self.show = transform
        return self

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    def __getitem__(self, index: int) -> dict[str, object]:
        return {key: values[0] for key, values in self.show({key: [values[index]] for key, values in self.rows.items()}).items()}


class GRPOTrainer:
    def __init__(
        self, model: str, *, reward_funcs: Callable, args: SimpleNamespace, train_dataset: Dataset, processing_class: Any, callbacks: list
    ) -> None:
        self.rewards, self.processor, self.callbacks = reward_funcs, processing_class, [*callbacks, PrinterCallback]
        self.args, self.train_dataset = args, train_dataset

    def remove_callback(self, kind: type) -> None:
        self.callbacks.remove(kind)

    def _tokenize_prompts(self, prompts: list) -> tuple[list, object, dict]:
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        fields = self.processor.apply_chat_template(prompts, **options)
        return fields["input_ids"].tolist(), None, {"pixel_values": fields["pixel_values"]}

    def train(self) -> None:
        (log,) = self.callbacks
        log.on_train_begin(None, None, None)
        prompts = len(self.train_dataset) // self.args.max_steps
        for step in range(self.args.max_steps):
            rows = [self.train_dataset[step * prompts + number] for number in range(prompts) for _ in range(self.args.num_generations)]
            columns = {key: [row[key] for row in rows] for key in ("current", "target", "image")}
            states = list(zip(columns["current"], columns["target"], strict=True))
            replies = [write_reply(state, optimal_action(state)) if index % 2 else "Up." for index, state in enumerate(states)]
            completions = [[{"role": "assistant", "content": reply}] for reply in replies]
            told = {"completions/mean_length": 8.0, "grad_norm": 1.0}
            rewards = self.rewards([row["prompt"] for row in rows], completions, **columns, log_metric=told.__setitem__)
            told["reward"] = sum(rewards) / len(rewards)
            log.on_log(None, SimpleNamespace(is_world_process_zero=True, global_step=step + 1), None, logs=told)
        out = sys.argv[sys.argv.index("--out") + 1]
        Path(f"{out}.rows").write_text(json.dumps(self.train_dataset.rows))


if __name__ == "__main__":
    for name, parts in {"datasets": {"Dataset": Dataset}, "trl": {"GRPOConfig": SimpleNamespace, "GRPOTrainer": GRPOTrainer}}.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(parts)
    sys.argv[0] = str(SCRIPT)
    runpy.run_path(str(SCRIPT), run_name="__main__")
