"""Generates ALFWorld games from the data files of the alfworld package.

The package provides the rules (alfred.pddl), texts (alfred.twl2), goals and 120 floor plans. Scenes
are numbered as in ALFWorld. Of the 30 scenes of each kind of room, the first 6 are held out and the
other 24 are for training. Objects get random locations. Receptacles without coordinates in the
package get random coordinates. The planner later checks whether a game can be won
(textworld_engine.py).
"""

import importlib.util
import json
import random
import runpy
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rl.config import require
from megatron_rl.tasks.alfworld.goals import ALFWORLD_NAME_BY_KIND, AlfworldGoal

APPLIANCE_BY_KIND = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}
ABILITY_BY_KIND = {"clean": "Cleanable", "heat": "Heatable", "cool": "Coolable"}
LAMP = "DeskLamp"
LAMP_RECEPTACLES = ("Desk", "SideTable", "Dresser", "CoffeeTable", "Shelf")
"""Receptacle types on which a desk lamp is placed."""
ROOM_BY_FIRST_SCENE = {1: "Kitchen", 201: "LivingRoom", 301: "Bedroom", 401: "Bathroom"}
NAME_MANGLING = str.maketrans({"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_", ",": "_comma_", " ": "_"})


@dataclass(slots=True, frozen=True)
class GameDraft:
    """Generated game that the planner has not yet checked for a solution."""

    goal: AlfworldGoal
    task_text: str
    """Description of the task in English."""
    pddl_problem: str
    """Initial state and goal of the game as a PDDL problem."""


@dataclass(frozen=True)
class AlfworldPackage:
    """Data files of the alfworld package that is installed in `package_dir`.

    The package is not imported, because importing it creates a folder in the user's home directory.
    """

    package_dir: Path

    @cached_property
    def constants(self) -> Mapping[str, Any]:
        """Variables that are defined in ALFWorld's gen/constants.py."""
        return runpy.run_path(str(self.package_dir / "gen" / "constants.py"))

    @cached_property
    def goal_library(self) -> Mapping[str, Mapping[str, Any]]:
        """Maps each ALFWorld task type to its PDDL goal and its text templates."""
        return runpy.run_path(str(self.package_dir / "gen" / "goal_library.py"))["gdict"]

    @cached_property
    def allowed_objects(self) -> Mapping[str, Set[str]]:
        """Maps each receptacle type to the object types that it may contain."""
        return self.constants["VAL_RECEPTACLE_OBJECTS"]

    @cached_property
    def fixed_receptacles(self) -> Set[str]:
        """Types of receptacles that cannot be moved."""
        return self.allowed_objects.keys() - self.constants["MOVABLE_RECEPTACLES_SET"]

    def list_scenes(self, split: str, kind: str) -> list[int]:
        """Return the numbers of the split's floor plans that support tasks of the given kind."""
        rooms = self.constants["GOALS_VALID"][ALFWORLD_NAME_BY_KIND[kind]]
        numbers = self.constants["TRAIN_SCENE_NUMBERS" if split == "train" else "TEST_SCENE_NUMBERS"]
        return [number for number in numbers if ROOM_BY_FIRST_SCENE[number - (number - 1) % 100] in rooms]

    def read_layout(self, scene: int, rng: random.Random) -> tuple[list[str], list[str]]:
        """Return the receptacles of a scene and the object types that the scene may contain.

        A receptacle has a name such as Cabinet|+00.68|+00.50|-02.20. The returned object types
        include the lamp and every type that at least one receptacle of the scene may contain.
        """
        plans = self.package_dir / "gen" / "layouts"
        receptacles = sorted(json.loads((plans / f"FloorPlan{scene}-openable.json").read_text()))
        types = sorted(json.loads((plans / f"FloorPlan{scene}-objects.json").read_text()))
        known = {object_type(receptacle) for receptacle in receptacles}
        places = [kind for kind in types if kind in self.fixed_receptacles - known and not kind.endswith("Basin")]
        receptacles += [f"{kind}|{random_coordinates(rng)}" for kind in places]
        held = set().union(*(self.allowed_objects[object_type(receptacle)] for receptacle in receptacles))
        return receptacles, [kind for kind in types if kind in held | {LAMP}]

    @property
    def pddl_domain(self) -> str:
        """Text of alfred.pddl."""
        return (self.package_dir / "data" / "alfred.pddl").read_text()

    def make_grammar(self, task: str) -> str:
        """Return the text of alfred.twl2 with `task` as the description of the goal."""
        return (self.package_dir / "data" / "alfred.twl2").read_text().replace("UNKNOWN GOAL", task)


def find_alfworld_package() -> AlfworldPackage:
    """Return the data files of the installed alfworld package.

    Raises:
        ValueError: The package is not installed.
    """
    spec = importlib.util.find_spec("alfworld")
    require(spec is not None, "alfworld", "missing", "required to generate games; run: pip install --no-deps alfworld==0.4.2")
    assert spec is not None and spec.submodule_search_locations is not None
    return AlfworldPackage(Path(spec.submodule_search_locations[0]))


def object_type(name: str) -> str:
    """Extract the object type from an object's name.

    Example: the object Sink|+00.10|+00.89|-02.01|SinkBasin has the type SinkBasin.
    """
    parts = name.split("|")
    return parts[4] if len(parts) == 5 else parts[0]


def random_coordinates(rng: random.Random) -> str:
    """Return random coordinates, formatted as in object names."""
    return "|".join(f"{rng.uniform(low, high):+06.2f}" for low, high in ((-3, 3), (0.5, 2), (-3, 3)))


def generate_drafts(
    package: AlfworldPackage, *, split: str, kind: str, rng: random.Random, max_receptacles: int, max_objects: int
) -> Iterator[GameDraft]:
    """Yield an infinite sequence of random games of one kind, using the scenes of one split.

    Args:
        package: Data files of the alfworld package.
        split: Split from which scenes are chosen, train or eval.
        kind: Kind of task, one of the values of KIND_BY_ALFWORLD_NAME.
        rng: Random number generator.
        max_receptacles: Maximum number of receptacles. Receptacles that the goal needs are always
            included. 0 includes all receptacles of the scene.
        max_objects: Maximum number of objects. 0 sets no limit.
    """
    scenes = package.list_scenes(split, kind)
    while True:
        scene = rng.choice(scenes)
        receptacles, types = package.read_layout(scene, rng)
        pairs = list(_goal_pairs(package, kind, receptacles, types))
        if not pairs:
            continue
        goal = AlfworldGoal(kind, *rng.choice(pairs), scene)
        chosen = _choose_receptacles(package, goal, receptacles, rng=rng, max_receptacles=max_receptacles)
        lying = _place_objects(package, goal, chosen, types, rng=rng, max_objects=max_objects)
        words = rng.choice(package.goal_library[ALFWORLD_NAME_BY_KIND[kind]]["templates"]).format(
            obj=goal.object_type.lower(), recep=goal.receptacle_type.lower(), toggle=goal.receptacle_type.lower()
        )
        yield GameDraft(goal, words, _write_pddl_problem(package, goal, chosen, lying))


def _goal_pairs(package: AlfworldPackage, kind: str, receptacles: Sequence[str], types: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each (object type, target receptacle type) pair for which a game can be generated.

    In games of kind `look`, the second entry of the pair is the lamp type.
    """
    there = sorted({object_type(receptacle) for receptacle in receptacles})
    able = package.constants["VAL_ACTION_OBJECTS"][ABILITY_BY_KIND[kind]] if kind in ABILITY_BY_KIND else types
    for thing in types:
        places = [place for place in there if thing in package.allowed_objects[place] and place != APPLIANCE_BY_KIND.get(kind)]
        if thing == LAMP or thing not in able or (kind in APPLIANCE_BY_KIND and APPLIANCE_BY_KIND[kind] not in there):
            continue
        if kind == "look" and places and LAMP in types and {*LAMP_RECEPTACLES} & {*there}:
            yield thing, LAMP
        elif kind != "look" and len(places) > 1:  # an object must not start in a receptacle of the target type
            yield from ((thing, place) for place in places)


def _choose_receptacles(
    package: AlfworldPackage, goal: AlfworldGoal, receptacles: Sequence[str], *, rng: random.Random, max_receptacles: int
) -> list[str]:
    """Return the receptacles that the goal requires, plus other receptacles chosen at random.

    The result has at most `max_receptacles` receptacles, unless the goal requires more. If
    `max_receptacles` is 0, all receptacles are returned.
    """
    shuffled = rng.sample(receptacles, len(receptacles))
    homes = {place for place in package.fixed_receptacles if goal.object_type in package.allowed_objects[place]} - {
        goal.receptacle_type,
        APPLIANCE_BY_KIND.get(goal.kind),
    }
    wanted = [homes, {*LAMP_RECEPTACLES} if goal.kind == "look" else {goal.receptacle_type}]
    if goal.kind in APPLIANCE_BY_KIND:
        wanted.append({APPLIANCE_BY_KIND[goal.kind]})
    needed = [next(each for each in shuffled if object_type(each) in types) for types in wanted]
    chosen = [*dict.fromkeys(needed)]
    rest = [each for each in shuffled if each not in chosen]
    return chosen + rest[: max(max_receptacles - len(chosen), 0) if max_receptacles else None]


def _place_objects(
    package: AlfworldPackage, goal: AlfworldGoal, receptacles: Sequence[str], types: Sequence[str], *, rng: random.Random, max_objects: int
) -> list[tuple[str, str]]:  # fmt: skip
    """Return random objects with their initial receptacles, as (object, receptacle) pairs.

    No object of the goal's type starts in a receptacle of the goal's target type.
    """

    def homes(thing: str) -> list[str]:
        return [
            each
            for each in receptacles
            if thing in package.allowed_objects[object_type(each)]
            and (thing, object_type(each)) != (goal.object_type, goal.receptacle_type)
        ]

    lying = [(goal.object_type, rng.choice(homes(goal.object_type))) for _ in range(2 if goal.kind == "two" else 1)]
    if goal.kind == "look":
        lying.append((LAMP, rng.choice([each for each in receptacles if object_type(each) in LAMP_RECEPTACLES])))
    others = [thing for thing in types if thing not in (goal.object_type, LAMP) for _ in range(rng.randint(1, 3))]
    rng.shuffle(others)
    lying += [(thing, rng.choice(homes(thing))) for thing in others if homes(thing)]
    return [(f"{thing}|{random_coordinates(rng)}", where) for thing, where in (lying[:max_objects] if max_objects else lying)]


def _write_pddl_problem(
    package: AlfworldPackage, goal: AlfworldGoal, receptacles: Sequence[str], placements: Sequence[tuple[str, str]]
) -> str:
    """Return the game as a PDDL problem in ALFWorld's format."""
    kinds = sorted({object_type(each) for each in receptacles})
    carried = sorted({object_type(thing) for thing, _ in placements})
    objects = ["agent1 - agent", *(f"loc_{number} - location" for number in range(len(receptacles) + 1))]
    objects += [f"{each.translate(NAME_MANGLING)} - receptacle" for each in receptacles]
    objects += [f"{thing.translate(NAME_MANGLING)} - object" for thing, _ in placements]
    objects += [*(f"{kind}Type - rtype" for kind in kinds), *(f"{kind}Type - otype" for kind in carried)]
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_0)"]
    spots = {receptacle: f"loc_{number}" for number, receptacle in enumerate(receptacles, start=1)}
    for receptacle, location in spots.items():
        name = receptacle.translate(NAME_MANGLING)
        facts += [f"(receptacleType {name} {object_type(receptacle)}Type)", f"(receptacleAtLocation {name} {location})"]
        if object_type(receptacle) in package.constants["OPENABLE_CLASS_SET"]:
            facts.append(f"(openable {name})")
    facts += [f"(canContain {kind}Type {thing}Type)" for kind in kinds for thing in carried if thing in package.allowed_objects[kind]]
    for thing, where in placements:
        name, kind = thing.translate(NAME_MANGLING), object_type(thing)
        facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} {where.translate(NAME_MANGLING)})"]
        facts += [f"(objectAtLocation {name} {spots[where]})", f"({'toggleable' if kind == LAMP else 'pickupable'} {name})"]
        facts += [f"({able.lower()} {name})" for able in ABILITY_BY_KIND.values() if kind in package.constants["VAL_ACTION_OBJECTS"][able]]
        if kind in package.constants["MOVABLE_RECEPTACLES_SET"]:
            facts.append(f"(isReceptacleObject {name})")
    goals = (
        package.goal_library[ALFWORLD_NAME_BY_KIND[goal.kind]]["pddl"]
        .format(obj=goal.object_type, recep=goal.receptacle_type, toggle=goal.receptacle_type)
        .replace("#", "-")
    )
    lines = ["(define (problem made)", "(:domain alfred)", "(:objects", *objects, ")", "(:init", *facts, ")", goals]
    return "\n".join(lines)
