"""Goals of ALFWorld games, and checks that a state meets the conditions of a goal."""

import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Self

KIND_BY_ALFWORLD_NAME: Mapping[str, str] = {
    "pick_and_place_simple": "pick",
    "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "two",
}
"""Maps each ALFWorld task type to the short name that this package uses."""
ALFWORLD_NAME_BY_KIND: Mapping[str, str] = {kind: name for name, kind in KIND_BY_ALFWORLD_NAME.items()}
CHANGE_PREDICATES: Mapping[str, str] = {"clean": "isclean", "heat": "ishot", "cool": "iscool"}
"""Predicate that the changed object must satisfy, keyed by the kind of task: clean, heat or
cool."""
FOLDER_PATTERN = re.compile(r"(?P<name>[a-z_]+)-(?P<thing>[A-Za-z]+)-None-(?P<place>[A-Za-z]+)-(?P<scene>\d+)")
"""Regular expression for the name of a game's parent folder in ALFWorld. The name contains the task
type, the object, the movable receptacle (always None in supported games), the target receptacle
(the lamp in games of kind `look`), and the scene.
"""
Facts = Mapping[str, Set[tuple[str, ...]]]
"""Maps each predicate of alfred.pddl to the set of argument tuples for which the predicate is true.
Names are in lower case, as in TextWorld.
"""


@dataclass(slots=True, frozen=True)
class AlfworldGoal:
    """Goal of a game. Type names, such as SinkBasin, are spelled as in ALFWorld."""

    kind: str
    object_type: str
    receptacle_type: str
    """Type of the target receptacle, or of the lamp in games of kind `look`."""
    scene: int
    """Number of the floor plan."""

    @classmethod
    def from_folder_name(cls, folder: str) -> Self | None:
        """Parse a folder name. Return None if ALFWorld does not support the game.

        Games with movable receptacles or sliced objects are not supported. For example, the folder
        name pick_heat_then_place_in_recep-Apple-None-CounterTop-12 is parsed into the goal (heat,
        Apple, CounterTop, 12).
        """
        read = FOLDER_PATTERN.fullmatch(folder)
        if read is None or read["name"] not in KIND_BY_ALFWORLD_NAME or read["thing"].endswith("Sliced"):
            return None
        return cls(KIND_BY_ALFWORLD_NAME[read["name"]], read["thing"], read["place"], int(read["scene"]))

    @property
    def folder_name(self) -> str:
        """Name of the folder that contains the games with this goal."""
        return f"{ALFWORLD_NAME_BY_KIND[self.kind]}-{self.object_type}-None-{self.receptacle_type}-{self.scene}"

    def count_met_conditions(self, facts: Facts) -> tuple[int, int]:
        """Return the number of conditions that are met and the total number of conditions.

        The conditions are defined in ALFWorld's env/tasks.py. The game is won when all conditions
        are met.
        """
        things = {thing for thing, kind in facts["objecttype"] if kind == f"{self.object_type.lower()}type"}
        if self.kind == "look":
            held = any(thing in things for _, thing in facts["holds"])
            return held + self._is_lit(facts), 2
        places = {place for place, kind in facts["receptacletype"] if kind == f"{self.receptacle_type.lower()}type"}
        placed = [(thing, place) for thing, place in facts["inreceptacle"] if thing in things and place in places]
        if self.kind == "pick":
            return int(bool(placed)), 1
        if self.kind == "two":
            return min(max(Counter(place for _, place in placed).values(), default=0), 2), 2
        changed = {thing for (thing,) in facts[CHANGE_PREDICATES[self.kind]] if thing in things}
        return bool(placed) + bool(changed) + any(thing in changed for thing, _ in placed), 3

    def _is_lit(self, facts: Facts) -> bool:
        """Return True if a lamp of the goal's type is at the agent's location and switched on."""
        lamps = {lamp for lamp, kind in facts["objecttype"] if kind == f"{self.receptacle_type.lower()}type"}
        here = {spot for _, spot in facts["atlocation"]}
        near = {place for place, spot in facts["receptacleatlocation"] if spot in here}
        return any((lamp,) in facts["istoggled"] and place in near for lamp, place in facts["inreceptacle"] if lamp in lamps)
