"""Tests what task=gymnasium refuses before the first step: one line with key, value and remedy."""

import re
from pathlib import Path

import gymnasium
import pytest

from megatron_rl.cli.help import read_field_docs
from megatron_rl.config import TaskSettings
from megatron_rl.config.task_options import AlfworldOptions, GymnasiumOptions
from megatron_rl.registry import build_task
from megatron_rl.tasks.gymnasium_envs import episode
from megatron_rl.tasks.gymnasium_envs.environment_client import load_grammar
from megatron_rl.tasks.gymnasium_envs.environment_server import check_environment
from megatron_rl.tasks.gymnasium_envs.episode import EpisodeSpec
from tests.contracts.test_configs import settings_of
from tests.support.picture_environments import MODULE


def refusal(full_id: str, *, actions: list[str] | None = None, **kwargs: object) -> str:
    """Return the message for an environment, as load_grammar composes it from the server's answer."""
    answer = check_environment(EpisodeSpec(id=full_id, kwargs=kwargs, image_side=0, actions=actions or []))
    key, value, remedy = answer["refused"]
    return f"{key}={value}: {remedy}"


@pytest.mark.filterwarnings("ignore:.*not in the possible render_modes")
@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("Wlak", {}, r"{id}: not registered; did you mean Walk-v0.*\?"),
        ("NoPictures", {}, r"{id}: renders no pictures; its metadata must have the render mode rgb_array and not only \['ansi'\]"),
        ("AtReset", {"fault": "module"}, "{id}: needs the module no_such_module; install the package that has it"),
        ("AtReset", {"fault": "package"}, r'{id}: a package is missing: pygame is not installed, run `pip install "gymnasium\[box2d\]"`'),
        ("AtReset", {"fault": "list"}, r"{id}: rendered list instead of an array of uint8 \(height, width, 3\); wrap it"),
        ("AtReset", {"fault": "float"}, r"{id}: rendered float64 \(8, 12, 3\) instead of an array of uint8 .*"),
        ("AtReset", {"fault": "gray"}, r"{id}: rendered uint8 \(8, 12\) instead of an array of uint8 .*"),
        ("AtReset", {"fault": "nan"}, "{id}: returned an observation that contains NaN; correct or wrap it"),
        ("AnySpace", {"space": "unbounded"}, r"{id}: has an action without bounds \(Box\(.*\)\); wrap it in .*"),
        ("AnySpace", {"space": "large"}, "{id}: has 17 numbers in an action; at least 1 and at most 16 are supported: wrap it"),
        ("AnySpace", {"space": "empty"}, "{id}: has 0 numbers in an action; .*"),
        ("AnySpace", {"space": "many_choices"}, "{id}: has 17 numbers in an action; .*"),
        ("AnySpace", {"space": "binary"}, r"{id}: has the action space MultiBinary\(3\); only Discrete, .* and Text .*: wrap it"),
        ("AnySpace", {"space": "dict"}, r"{id}: has the action space Dict\('a': Discrete\(2\)\); only .*"),
        ("AnySpace", {"space": "tuple"}, r"{id}: has the action space Tuple\(Discrete\(2\)\); only .*"),
        ("Walk", {"actions": ["a", "b"]}, r"task.options.actions=\['a', 'b'\]: must be 3 names, one for each action of {name}"),
        ("AnySpace", {"space": "box", "actions": ["a"]}, r"task.options.actions=.*: names actions, but {name} has the space .*; remove it"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_run(name: str, given: dict, message: str) -> None:
    full_id = f"{MODULE}:{name}-v0"
    pattern = message.replace("{id}", f"task.options.id={full_id}").replace("{name}", full_id)
    assert re.fullmatch(pattern, refusal(full_id, **given))


@pytest.mark.parametrize(
    ("full_id", "message"),
    [
        (
            "no_such_module:My-v0",
            "task.options.id=no_such_module:My-v0: no module named no_such_module; .* or add its folder to PYTHONPATH",
        ),
        ("FrozenLake-v9", "task.options.id=FrozenLake-v9: not registered; did you mean FrozenLake-v1 or .*"),
        ("zzzzzzzzzzz", "task.options.id=zzzzzzzzzzz: not registered; name its module: my_module:MyEnv-v0"),
        ("lost_package/My-v0", "task.options.id=.*: no module named lost_module; install its package: pip install lost-package"),
    ],
)
def test_an_id_that_does_not_exist(full_id: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(episode.KNOWN_MODULES, "lost_package/", ("lost_module", "lost-package"))
    assert re.fullmatch(message, refusal(full_id))


def test_known_ids_need_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of a known id is imported, also by the process that checks the environment, which
    searches the same folders.
    """
    registers = f"import gymnasium\ngymnasium.register('Known-v0', '{MODULE}:Walk')\n"
    (tmp_path / "known_environments.py").write_text(registers)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(episode.KNOWN_MODULES, "Known-", ("known_environments", "known"))
    assert check_environment(EpisodeSpec(id="Known-v0", kwargs={}, image_side=0, actions=[]))["grammar"]["low"] == [2]
    assert load_grammar(GymnasiumOptions(id="known_environments:Known-v0")).low == [2]
    monkeypatch.delitem(gymnasium.registry, "Known-v0")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("crash", "crashed with signal 11 when it was created and reset; .*"),
        ("hang", r"could not be created and reset within 2 s \(task.options.step_timeout_s\)"),
        ("error", r"could not be .* with task.options.kwargs=.*'error'.*: ZeroDivisionError: an error of the environment"),
        ("quit", "could not be .*: no error message"),
    ],
)
def test_a_failure_at_reset_is_no_failure_of_the_run(fault: str, message: str) -> None:
    """The environment is checked in a process of its own, which may crash or exceed its limit."""
    with pytest.raises(ValueError, match=r"^task.options.id=") as error:
        load_grammar(GymnasiumOptions(id=f"{MODULE}:AtReset-v0", kwargs={"fault": fault}, step_timeout_s=2))
    assert re.fullmatch(f"task.options.id={MODULE}:AtReset-v0: {message}", str(error.value))


def test_what_the_server_refuses_the_task_refuses() -> None:
    """Examples are not returned for an environment that cannot be run. Text that an environment
    prints is not read as an answer.
    """
    for kwargs, message in (({"space": "dict"}, "has the action space"), ({"size": 3}, r"unexpected keyword argument 'size'")):
        task = build_task(TaskSettings(name="gymnasium", options=GymnasiumOptions(id=f"{MODULE}:AnySpace-v0", kwargs=kwargs)))
        with pytest.raises(ValueError, match=message) as error:
            task.examples("train")
        assert "\n" not in str(error.value)
    assert load_grammar(GymnasiumOptions(id=f"{MODULE}:AtReset-v0", kwargs={"fault": "prints"})).high == [1]


def test_options() -> None:
    given = ("task=gymnasium", "model.path=here", "run.dir=there", "task.options.id=A-v0")
    words = ("+task.options.kwargs={size: 8}", "task.options.history=4", "task.options.actions=[a,b]", "task.options.success_reward=0.5")
    expected = GymnasiumOptions(id="A-v0", kwargs={"size": 8}, history=4, actions=["a", "b"], success_reward=0.5)
    assert settings_of(*given, *words).task.options == expected
    assert {*read_field_docs(GymnasiumOptions)} == {*GymnasiumOptions.__dataclass_fields__}
    for wrong in ({"kwargs": {"render_mode": "human"}}, {"image_side": 27}, {"image_side": 4097}, {"history": 0}, {"history": 65},
                  {"actions": ["a", "a"]}, {"actions": [""]}, {"invalid": "noop"}, {"train_seeds": 0}, {"eval_seeds": 1_000_001},
                  {"processes": 0}, {"step_timeout_s": 0}):  # fmt: skip
        (name,) = wrong
        with pytest.raises(ValueError, match=rf"^task.options.{name}="):
            GymnasiumOptions(**wrong)
    with pytest.raises(ValueError, match=r"^task.options.id=: is empty; choose an environment, e.g. task.options.id="):
        build_task(TaskSettings(name="gymnasium"))
    with pytest.raises(ValueError, match=r"^task.options=.*: are options of a different task; choose task=gymnasium"):
        build_task(TaskSettings(name="gymnasium", options=AlfworldOptions()))
    with pytest.raises(ValueError, match=r"^task.prompt={question}: task gymnasium has fixed prompts"):
        build_task(TaskSettings(name="gymnasium", prompt="{question}", options=GymnasiumOptions(id="A-v0")))
