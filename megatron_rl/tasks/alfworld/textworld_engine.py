"""Runs a game in TextWorld's PDDL engine and returns observations, commands and goal progress.

Import this module only in a process that does nothing but run games. A process can run only one
TextWorld game at a time, and only from one thread. The reason is that TextWorld's translator and
its planner (Fast Downward, a C library) keep their state in global variables.

TextWorld evaluates the grammar in a game file as Python code, so use only trusted game files. Text
from a policy never becomes part of a grammar.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

# TextWorld 1.7.0 imports the package jericho in envs/zmachine/jericho.py. PDDL games do not use
# jericho, which must be compiled, so an empty stub replaces it.
jericho: Any = ModuleType("jericho")
jericho.UnsupportedGameWarning = jericho.TruncatedInputActionWarning = type("JerichoWarning", (Warning,), {})
sys.modules.setdefault("jericho", jericho)

import fast_downward  # noqa: E402  # pyright: ignore[reportMissingImports] (optional: launch/install_alfworld.sh)
from textworld.envs.pddl.logic import GameLogic, PddlState  # noqa: E402  # pyright: ignore[reportMissingImports] (optional: launch/install_alfworld.sh)
from textworld.generator.game import EntityInfo  # noqa: E402  # pyright: ignore[reportMissingImports] (optional: launch/install_alfworld.sh)
from textworld.logic import Action  # noqa: E402  # pyright: ignore[reportMissingImports] (optional: launch/install_alfworld.sh)

from megatron_rl.tasks.alfworld.goals import AlfworldGoal, Facts  # noqa: E402
from megatron_rl.tasks.alfworld.scene_prompts import GameObservation  # noqa: E402

TASK_PATTERN = re.compile(r"(?<=Your task is to: )[^\"]*(?=\.\")")
"""Regular expression that matches the task description in a game's grammar."""


def assign_names(ids: Iterable[str]) -> dict[str, str]:
    """Map TextWorld's ids to ALFWorld's names, e.g. cabinet_bar__minus_01... to cabinet 3.

    Among the ids of one kind, the first in sorted order gets the highest number, as in the class
    Demangler of alfworld 0.4.2 (agents/utils/misc.py).
    """
    kinds = {each: _object_kind(each) for each in sorted(ids)}
    left = Counter(kinds.values())
    names = {}
    for each, kind in kinds.items():
        is_numbered = "_bar_" in each
        names[each] = f"{kind} {left[kind]}" if is_numbered else f"{kind} "
        left[kind] -= is_numbered
    return names


def _object_kind(mangled: str) -> str:
    kind, bar, _ = mangled.partition("_bar_")
    return f"{kind}basin" if bar and "basin" in mangled else kind


@cache
def load_logic(domain: str, grammar: str) -> GameLogic:
    """Parse the rules and texts that all games share. The result is cached.

    Grammars differ only in the task description, which is used only in the intro of a game. The
    caller replaces the description with a fixed text, so all games share one cache entry.
    """
    return GameLogic(domain=domain, grammar=grammar)


class TextWorldGame:
    """TextWorld game loaded from a file. Exceptions that TextWorld raises are not caught."""

    library = None
    """Handle of this process's copy of the Fast Downward library. The library is loaded with the
    first game.
    """

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text())
        goal = AlfworldGoal.from_folder_name(path.parents[1].name)
        assert goal is not None, f"{path}: no game of ALFWorld's"
        self.goal = goal
        found = TASK_PATTERN.search(data["grammar"])
        assert found is not None, f"{path}: its grammar names no task"
        self.task = found[0]
        self.logic = load_logic(data["pddl_domain"], TASK_PATTERN.sub("UNKNOWN GOAL", data["grammar"]))
        if TextWorldGame.library is None:
            TextWorldGame.library = fast_downward.load_lib()
        self.state = PddlState(TextWorldGame.library, data["pddl_problem"], self.logic)
        self.entity_infos = {each.name: EntityInfo(each.name, each.type) for fact in self.state.facts for each in fact.arguments}
        for each, name in assign_names(self.entity_infos).items():
            info: Any = self.entity_infos[each]  # TextWorld declares the attributes as None
            info.name, info.definite, info.indefinite = name, "the", "a"
        self.command_texts: dict[tuple[str, ...], str] = {}
        """Cached command text of each action that has been admissible so far. Caching is correct
        because ALFWorld's command templates do not depend on state that changes.
        """
        self.actions: dict[str, Action] = {}

    def start(self) -> GameObservation:
        """Return the first observation."""
        return self._observe(self._derive_text("#look.feedback#"))

    def step(self, command: str) -> GameObservation:
        """Run a command and return the observation.

        As in TextWorld, an inadmissible command does not change the state.
        """
        if command not in self.actions:
            return self._observe("Nothing happens.")
        action = self.actions[command]
        self.state.apply(action)
        return self._observe(self._derive_text(cast(str, action.feedback_rule), action))

    def plan_commands(self) -> list[str]:
        """Return commands, found by the planner, that win the game from the current state.

        The list is empty if there is no plan. Planning time grows quickly with the size of the
        game.
        """
        return self.state.replan(self.entity_infos)

    def collect_facts(self) -> Facts:
        """Return the facts of the current state."""
        facts = defaultdict(set)
        for fact in self.state.facts:
            facts[fact.name].add(tuple(each.name for each in fact.arguments))
        return facts

    def _observe(self, text: str) -> GameObservation:
        self.actions = {}
        for action in self.state.all_applicable_actions():
            self.actions.setdefault(self._command_text(action), action)
        met, conditions = self.goal.count_met_conditions(self.collect_facts())
        return GameObservation(
            text=text, commands=sorted(self.actions), is_won=self.state.check_goal(), num_met=met, num_conditions=conditions
        )

    def _command_text(self, action: Action) -> str:
        key = (action.name, *(each.name for each in action.mapping.values()))
        if key not in self.command_texts:
            self.command_texts[key] = self._derive_text(cast(str, action.command_template), action)
        return self.command_texts[key]

    def _derive_text(self, rule: str, action: Action | None = None) -> str:
        mapping = {} if action is None else action.mapping
        context = {
            "state": self.state, "facts": list(self.state.facts), "mapping": mapping, "entity_infos": self.entity_infos,
            "variables": {placeholder.name: self.entity_infos[each.name] for placeholder, each in mapping.items()},
        }  # fmt: skip
        return self.logic.grammar.derive(rule, context)
