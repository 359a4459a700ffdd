"""The oracle for the ALFWorld task: plays games in TextWorld's own environment, with the object
names of the alfworld package.

    python textworld_reference.py < GAMES.json

Reads {"path of a game": [commands], ...} and prints {path: [[text, admissible commands, won],
...]}.
"""

import json
import sys
from types import ModuleType

jericho = sys.modules["jericho"] = ModuleType("jericho")  # engine of another kind of games
jericho.UnsupportedGameWarning = jericho.TruncatedInputActionWarning = BytesWarning

from alfworld.agents.utils.misc import Demangler  # noqa: E402
from textworld import EnvInfos  # noqa: E402
from textworld.envs.pddl import PddlEnv  # noqa: E402


def main() -> None:
    seen = {}
    for path, commands in json.load(sys.stdin).items():
        env = PddlEnv(EnvInfos(admissible_commands=True, won=True))
        env.load(path)
        names = Demangler(game_infos=env._entity_infos)
        for info in env._entity_infos.values():
            info.name = names.demangle_alfred_name(info.id)
        state = env.reset()
        seen[path] = [[state.feedback, state["admissible_commands"], state["won"]]]
        for command in commands:
            state, _, _ = env.step(command)
            seen[path].append([state.feedback, state["admissible_commands"], state["won"]])
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
