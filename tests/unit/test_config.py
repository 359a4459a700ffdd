"""A refused value is told under the key that the user has to change."""

import pytest

from megatron_rl.config import AlgoSettings, SftSettings


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
