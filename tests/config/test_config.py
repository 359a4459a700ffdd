"""A refused value is told under the key that the user has to change."""

import pytest

from megatron_rl.config import AlgoSettings, RunSettings, SftSettings


@pytest.mark.parametrize(("settings", "room"), [(AlgoSettings, "algo"), (SftSettings, "sft")])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "steep"}, "schedule=steep: choose one of constant, linear, cosine"),
        ({"lr": -1.0}, "lr=-1.0: must not be negative"),
        ({"lr": 0.1, "min_lr": 0.2}, r"min_lr=0.2: must lie between 0 and ROOM.lr=0.1"),
        ({"clip_grad": 0.0}, "clip_grad=0.0: must be positive"),
    ],
)
def test_an_optimizer_setting_is_named_by_its_room(settings: type, room: str, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{room}.{message.replace('ROOM', room)}"):
        settings(**values)


@pytest.mark.parametrize(
    ("settings", "values", "key"),
    [
        (AlgoSettings, {"kl_coef": -0.1}, "algo.kl_coef=-0.1"),
        (AlgoSettings, {"std_eps": -1e-6}, "algo.std_eps=-1e-06"),
        (SftSettings, {"num_demonstrations": 0}, "sft.num_demonstrations=0"),
        (SftSettings, {"micro_batch_tokens": 0}, "sft.micro_batch_tokens=0"),
        (SftSettings, {"splits": ["a", "b"], "steps": [-5, 10]}, r"sft.steps=\[-5, 10\]"),
        (SftSettings, {"splits": [], "steps": []}, r"sft.steps=\[\]"),
        (RunSettings, {"dir": "r", "max_failed": 1.0}, "run.max_failed=1.0"),
        (RunSettings, {"dir": "r", "record_best": -1}, "run.record_best=-1"),
    ],
)
def test_what_could_only_end_in_a_traceback_is_refused_at_once(settings: type, values: dict, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        settings(**values)
